"""The version, in a separate module so that the disk format can use it without importing the package."""

from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def installed() -> list[str]:
    """This package and those that decide what it does, with their versions."""
    found = [f"hf_posenc {__version__}"]
    for package in ("torch", "transformers", "peft"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found
