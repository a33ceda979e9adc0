"""Replace the position encoding of any Hugging Face transformers model, exactly and reversibly.

    hf_posenc.patch_model(model, "alibi")  # help(hf_posenc.patch_model); hf_posenc.list_schemes() names all
    hf_posenc.unpatch_model(model)

Importing this package also enables `from_pretrained` to load checkpoints of patched models. Everything else is imported
on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.install import install as _install
from hf_posenc.errors import missing_attribute
from hf_posenc.serving.http import install as _install_in_server
from hf_posenc.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_posenc import metrics as metrics, plots as plots, recipes as recipes, schemes as schemes
    from hf_posenc.checkpoint.configuration import CheckpointError as CheckpointError
    from hf_posenc.checkpoint.position_adapters import (
        load_position_adapter as load_position_adapter,
        save_position_adapter as save_position_adapter,
    )
    from hf_posenc.errors import (
        PositionEncodingError as PositionEncodingError,
        SequenceLengthError as SequenceLengthError,
        UnknownNameError as UnknownNameError,
        UnsupportedError as UnsupportedError,
    )
    from hf_posenc.export.export_model import export_model as export_model
    from hf_posenc.export.records import ExportReport as ExportReport
    from hf_posenc.patching import (
        Architecture as Architecture,
        SinkCache as SinkCache,
        accept_cache as accept_cache,
        extend_context as extend_context,
        inspect_model as inspect_model,
        native_scheme as native_scheme,
        patch_model as patch_model,
        register_architecture as register_architecture,
        unpatch_model as unpatch_model,
    )
    from hf_posenc.schemes import *  # noqa: F403

_HOMES = {
    "hf_posenc.checkpoint.configuration": ("CheckpointError",),
    "hf_posenc.checkpoint.position_adapters": ("load_position_adapter", "save_position_adapter"),
    "hf_posenc.errors": ("PositionEncodingError", "SequenceLengthError", "UnknownNameError", "UnsupportedError"),
    "hf_posenc.export.export_model": ("export_model",),
    "hf_posenc.export.records": ("ExportReport",),
    "hf_posenc.patching": (
        "Architecture", "SinkCache", "accept_cache", "extend_context", "inspect_model", "native_scheme",
        "patch_model", "register_architecture", "unpatch_model",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBPACKAGES = ("metrics", "plots", "recipes", "schemes")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME_OF:
        globals()[name] = value = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value
    # All names in `hf_posenc.schemes` are also names of this package.
    schemes = importlib.import_module("hf_posenc.schemes")
    if name == "__all__":
        return sorted([*_HOME_OF, *schemes.__all__, "__version__"])
    if not name.startswith("_") and hasattr(schemes, name):
        return getattr(schemes, name)
    registered = [config.__name__ for config in schemes.registered_configs()]
    raise missing_attribute(__name__, name, [*_HOME_OF, *_SUBPACKAGES, *schemes.__all__, *registered])


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__"), *_SUBPACKAGES})


_install()
_install_in_server()
