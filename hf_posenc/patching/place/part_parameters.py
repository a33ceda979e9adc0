"""The parameters of a part of a model, with those of the scheme in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn import Parameter

from hf_posenc.patching.place.journal import Journal


class PartParameters:
    """Stands in for the method `parameters` of an encoder or another part of a model.

    The base model holds the scheme of all its parts. Code that freezes a part, clips its gradients or gives it to an
    optimizer asks the part for its parameters, and means those of its scheme too.

    Args:
        module: the part.
        schemes: the schemes of the stacks in it.
    """

    def __init__(self, module: nn.Module, schemes: list[nn.Module]) -> None:
        self.module = module
        self.schemes = schemes

    def __call__(self, recurse: bool = True) -> Iterator[Parameter]:
        """Iterates over the parameters of the part, then over those of its scheme."""
        yield from type(self.module).parameters(self.module, recurse)
        for scheme in self.schemes if recurse else ():
            yield from scheme.parameters()

    @classmethod
    def place(cls, base: nn.Module, schemes: Mapping[int, nn.Module], journal: Journal) -> None:
        """Sets an instance on every module between a base model and its stacks.

        Args:
            base: the module that holds the schemes.
            schemes: the scheme of each stack that has parameters, by the identity of the stack.
            journal: records the changes.
        """
        for module in base.modules():
            inside = [schemes[id(one)] for one in module.modules() if id(one) in schemes]
            if inside and module is not base:
                journal.set(module, "parameters", cls(module, inside))
