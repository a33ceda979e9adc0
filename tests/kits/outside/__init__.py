"""The test suites of transformers and PEFT, run on patched models. See `__main__.py`."""
