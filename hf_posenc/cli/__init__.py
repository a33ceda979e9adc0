"""The shell command `hf-posenc`. Every verb is one call of the library."""

from hf_posenc.cli.parser import main

__all__ = ["main"]
