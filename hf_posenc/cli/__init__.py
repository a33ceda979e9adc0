"""The shell command `hf-posenc`: every verb is one call into the library."""

from hf_posenc.cli.parser import main

__all__ = ["main"]
