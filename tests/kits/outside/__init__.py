"""The test suites of transformers and PEFT, run on patched models. See `run.py`."""
