"""The target "remote_code": a checkpoint with a file of code that transformers loads with `trust_remote_code=True`."""
