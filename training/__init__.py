"""Training scripts: run them with `accelerate launch`, or as plain Python files."""
