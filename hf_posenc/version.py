"""The version, in a separate module so that the disk format can use it without importing the package."""

__version__ = "0.1.0"
