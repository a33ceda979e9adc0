"""Decides which schemes an inference engine can compute, and runs a patched model in its transformers backend.

An engine maps each key once, when its token arrives, and stores it in pages. Its kernel then attends over the pages,
in a batch of many requests. No code of a scheme can run inside the kernel, but some kernels take the slopes of ALiBi.
These parts of a scheme can therefore run:

- vectors added to the input, and maps of queries and keys, because they depend only on the position of a token;
- factors of the logits that depend on the position of the query, which are multiplied with the query;
- a bias that is linear in the distance, if the kernel takes slopes.

Both vLLM and SGLang build the model from its config on the meta device, which places the scheme, and then replace its
linear layers and attention functions. The patched forwards stay in place, and run between the layers of the engine.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from hf_posenc.checkpoint.agreement import NamedSchemes
from hf_posenc.entry import find_mark
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.call.interface_attention import InterfaceAttention
from hf_posenc.patching.forwards import as_forward, placed_forward
from hf_posenc.patching.inspection import engine_problem, unsupported_kind
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.schemes.needs import Environment


def refuse_settings(engine: str, config: Any, *, processes: int) -> None:
    """Refuses models and settings that the plug-ins do not support, before a model is built.

    Args:
        engine: name of the engine, for messages.
        config: the config of the model.
        processes: number of processes that share one copy of the model (tensor and pipeline parallelism).

    Raises:
        UnsupportedError: with the reason.
    """
    if processes > 1:
        problem = f"{engine} was started with {processes} processes for one model (tensor or pipeline parallelism)"
    elif not (problem := unsupported_kind(config)):
        return
    raise UnsupportedError(
        f'{problem}, which the plug-in of hf_posenc does not support. If export_model(model, folder, to="stock") can '
        f"express the scheme, {engine} runs that folder without the plug-in and without this limit."
    )


def sites_for_engine(model: Any, engine: Environment) -> list[InterfaceAttention]:
    """Returns the patched attention layers of a model, if an engine can compute its scheme.

    Args:
        model: a patched model. It may be without weights (on the meta device). It is put into evaluation mode.
        engine: what the engine lacks.

    Raises:
        UnsupportedError: if the engine cannot compute the scheme, with the reason.
    """
    encoding = current_encoding(model)
    assert encoding is not None
    model.eval()
    if problem := engine_problem(model, engine):
        raise UnsupportedError(engine.message(problem, f"{encoding.label} of this {type(model).__name__}"))
    return encoding.record.placed(InterfaceAttention)


def restore_forwards(model: Any, sites: list[InterfaceAttention]) -> None:
    """Puts the patched forwards back after an engine has rewritten the attention modules.

    vLLM compiles a forward from the source of the module's class, with one projection in place of three, and sets it on
    the instance. The patched forward then runs this new forward.

    Args:
        model: the patched model.
        sites: its patched attention layers, as they were before the engine changed the model.

    Raises:
        UnsupportedError: if the engine has set a forward that cannot be run with the scheme.
    """
    for site in sites:
        forward = site.module.forward
        if placed_forward(forward) is site:
            continue
        if not isinstance(forward, types.MethodType) or forward.__func__ is type(site.module).forward:
            raise UnsupportedError(
                f"The engine has replaced the forward of {type(site.module).__name__} by {forward!r}, which cannot be "
                "run with the position encoding. Use another version of the engine."
            )
        site.follow(forward)
        site.module.forward = as_forward(site)
    encoding = current_encoding(model)
    assert encoding is not None
    for stack in encoding.stacks.values():
        # The watch reports modules that were added after the patch, and would report the engine's modules.
        stack.runtime.watch = None


def without_mark(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a checkpoint without the entry that names their scheme, which is compared with the model.

    Raises:
        SchemeMismatchError: if the weights were trained with another scheme, or name none.
    """
    marks = {}
    for name, tensor in weights:
        if find_mark([name]) is None:
            yield name, tensor
        else:
            marks[name] = tensor
    NamedSchemes.of(marks, "this checkpoint").check(model, " Restore their own config.json.", reader="the engine")
