"""The targets of `export_model`, one row each."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import UnknownNameError
from hf_posenc.installation import EXTRAS, missing, require

if TYPE_CHECKING:
    from hf_posenc.export.carriers import Export


@dataclass(frozen=True)
class Target:
    """A format that other programs read.

    Args:
        name: value of `to=`.
        summary: one line for help texts.
        home: `"module:class"` of its subclass of `Export`.
        program: the program that runs it.
        takes_almost_all: whether it can express almost every scheme, in models that are not an encoder and a decoder.
        keeps_images: whether it writes the whole of a model of images or sound. Others write a program for token ids.
    """

    name: str
    summary: str
    home: str
    program: str
    takes_almost_all: bool = False
    keeps_images: bool = False

    def missing_packages(self) -> list[str]:
        """Those packages that write and check it and are not installed."""
        return missing(EXTRAS.get(self.name, ()))

    def export(self, options: Mapping[str, Any]) -> Export[Any]:
        """Returns the export of this target with some options.

        Raises:
            MissingPackageError: if packages are not installed.
            UsageError: for a value that an option cannot have.
            UnknownNameError: for an option that the target does not have.
        """
        require(f"The export to {self.name!r}", *EXTRAS.get(self.name, ()))
        export_class: type[Export[Any]] = pkgutil.resolve_name(self.home)
        known = list(inspect.signature(export_class).parameters)
        for name in options:
            if name not in known:
                raise UnknownNameError("option", name, known, owner=f"the export to {self.name!r}")
        return export_class(**options)


TARGETS = (
    Target(
        "stock",
        "a plain transformers checkpoint (options: max_shard_size, variant)",
        "hf_posenc.export.stock.target:StockExport",
        "plain transformers",
        keeps_images=True,
    ),
    Target(
        "remote_code",
        "a checkpoint with a file of code for trust_remote_code=True (options: max_shard_size, variant)",
        "hf_posenc.export.remote_code.target:RemoteCodeExport",
        "plain transformers with trust_remote_code=True",
    ),
    Target(
        "gguf",
        "a file for llama.cpp (options: dtype=f32, f16 or q8_0; pooling=mean, cls, last or none)",
        "hf_posenc.export.gguf.target:GgufExport",
        "llama.cpp",
    ),
    Target(
        "onnx",
        "a graph for onnxruntime (options: quantize=true, opset_version)",
        "hf_posenc.export.onnx:OnnxExport",
        "ONNX Runtime",
        takes_almost_all=True,
    ),
    Target(
        "executorch",
        "a program for ExecuTorch, without a cache (option: max_length)",
        "hf_posenc.export.executorch:ExecutorchExport",
        "ExecuTorch",
        takes_almost_all=True,
    ),
)


#: The targets that transformers loads, also by the name of a repository.
OF_TRANSFORMERS = ("stock", "remote_code")


def find_target(name: str) -> Target:
    """Looks a target up.

    Raises:
        UnknownNameError: if there is none of this name.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    raise UnknownNameError("export target", name, [target.name for target in TARGETS])
