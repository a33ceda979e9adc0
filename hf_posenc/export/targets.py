"""The targets of `export_model`, one row each."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_posenc.export.records import Written


#: A writer takes a request and the options of its target, which are its keyword-only parameters. It writes the model
#: into the request's empty folder, compares what the target's program computes with the model, and raises
#: `UnsupportedError` if that differs. It does not change the model. If it raises, nothing of the export remains.
Writer = Callable[..., "Written"]


@dataclass(frozen=True)
class Target:
    """A format that other programs read.

    Args:
        name: value of `to=`.
        summary: one line for help texts.
        home: module of the writer, whose name is `write`.
        packages: what must be installed to write and check it, as `pip install` takes it.
        program: what runs it.
        takes_almost_all: whether it can express almost every scheme, in models that are not an encoder and a decoder.
            The module of any other target also has a function `proposal`, which names what could carry the scheme of a
            model.
        keeps_images: whether it writes the whole of a model of images or sound. Others write a program for token ids.
    """

    name: str
    summary: str
    home: str
    packages: tuple[str, ...] = ()
    program: str = ""
    takes_almost_all: bool = False
    keeps_images: bool = False

    def missing_packages(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name.replace("-", "_")) is None]

    def advice(self, model: PreTrainedModel) -> str | None:
        """What an export of a model to this target would give, as far as is known before it is written.

        Args:
            model: a model that another target has refused.

        Returns:
            A line of advice; `None` if this target has nothing that could carry the scheme.
        """
        from hf_posenc.export.modalities import other_modalities

        if other_modalities(model):
            return None
        advice, missing = f"export it to {self.name!r}", self.missing_packages()
        if self.takes_almost_all:
            return None if model.config.is_encoder_decoder else f"{advice}: {self.program} runs almost every scheme"
        if missing:
            packages = " ".join(missing)
            return f"{advice}, if {self.program} has it, which this message says after: pip install {packages}"
        found = importlib.import_module(self.home).proposal(model)
        return None if found is None else f"{advice}: {self.program} has {found}"

    def writer(self) -> Writer:
        """Imports the writer."""
        writer: Writer = importlib.import_module(self.home).write
        return writer

    def check_packages(self) -> None:
        """Raises `UsageError` if packages are not installed."""
        missing = self.missing_packages()
        if missing:
            raise UsageError(
                f"The export to {self.name!r} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
            )

    def check_options(self, options: dict[str, Any]) -> None:
        """Refuses options that the writer does not have.

        Raises:
            UnknownNameError: naming the first.
        """
        parameters = inspect.signature(self.writer()).parameters.values()
        known = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
        for name in options:
            if name not in known:
                raise UnknownNameError("option", name, known, owner=f"the export to {self.name!r}")


TARGETS = (
    Target(
        "stock",
        "a plain transformers checkpoint (options: max_shard_size, variant)",
        "hf_posenc.export.stock.write",
        program="plain transformers",
        keeps_images=True,
    ),
    Target(
        "gguf",
        "a file for llama.cpp (options: dtype=f32, f16 or q8_0; pooling=mean, cls, last or none)",
        "hf_posenc.export.gguf.write",
        ("gguf", "xllamacpp"),
        program="llama.cpp",
    ),
    Target(
        "onnx",
        "a graph for onnxruntime (options: quantize=true, opset_version)",
        "hf_posenc.export.onnx.write",
        ("onnx", "onnxruntime", "onnxscript"),
        program="ONNX Runtime",
        takes_almost_all=True,
    ),
    Target(
        "executorch",
        "a program for ExecuTorch, without a cache (option: max_length)",
        "hf_posenc.export.executorch",
        ("executorch",),
        program="ExecuTorch",
        takes_almost_all=True,
    ),
)


def find_target(name: str) -> Target:
    """Looks a target up.

    Raises:
        UnknownNameError: if there is none of this name.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    raise UnknownNameError("export target", name, [target.name for target in TARGETS])
