"""A patched model inside the backend of an engine that runs models of transformers.

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
from hf_posenc.patching.place.encoding import current_encoding


def restore_forwards(model: Any, sites: list[InterfaceAttention]) -> None:
    """Puts the patched forwards back after an engine has rewritten the attention modules.

    vLLM compiles a forward from the source of the module's class, with one projection in place of three, and sets it on
    the instance. The patched forward then runs that one.

    Args:
        model: the patched model.
        sites: its patched attention layers, as they were before the engine changed the model.

    Raises:
        UnsupportedError: if the engine has set a forward that cannot be run with the scheme.
    """
    for site in sites:
        found = site.module.forward
        if found is site:
            continue
        if not isinstance(found, types.MethodType) or found.__func__ is type(site.module).forward:
            raise UnsupportedError(
                f"The engine has replaced the forward of {type(site.module).__name__} by {found!r}, which the position "
                "encoding cannot follow. Use another version of the engine."
            )
        site.follow(found)
        site.module.forward = site
    encoding = current_encoding(model)
    assert encoding is not None
    for stack in encoding.stacks.values():
        # It looks for modules that were added after the patch, and would take the engine's modules for such.
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
    NamedSchemes.of(marks, "this checkpoint").check(model, target="its config.json")
