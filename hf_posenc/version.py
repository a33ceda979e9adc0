"""Version and address, in a separate module so that the disk format can use them without importing the package."""

from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"
#: Where the source is, as in `[project.urls]` of pyproject.toml, which an uninstalled clone cannot read.
REPOSITORY = "https://github.com/hf-posenc/hf_posenc"


def with_version(package: str) -> str:
    """Returns the name and version of a package; only the name if it is not installed."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def installed() -> list[str]:
    """Returns this package and the packages that affect its behaviour, with their versions."""
    others = map(with_version, ("torch", "transformers", "peft"))
    return [f"hf_posenc {__version__}", *(package for package in others if " " in package)]
