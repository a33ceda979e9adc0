"""What the tokens of a stack are: words, patches on a grid, frames of a series.

There is one class for each kind, in `patching/layouts`. It answers every question whose answer depends on the kind, so
no other code asks which kind it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.schemes.config import SchemeConfig

if TYPE_CHECKING:
    from hf_posenc.patching.anatomy.anatomy import Anatomy, StackModules
    from hf_posenc.patching.anatomy.native_scheme import Rotation
    from hf_posenc.patching.anatomy.sites import AttentionLayer, Stack
    from hf_posenc.schemes.parts import AdditiveEncoding, Part, SchemeParts


class TemporaryChanges(Protocol):
    """Changes of a stock model for short runs. A transaction makes them and takes them back."""

    def with_scheme(self, config: SchemeConfig, stacks: list[Stack]) -> AbstractContextManager[Any]:
        """Context manager that yields the encoding with which some stacks run."""

    def with_forwards(self, forwards: list[tuple[nn.Module, Any]]) -> AbstractContextManager[None]:
        """Context manager in which some modules have other forwards."""


class Layout:
    """The tokens of one stack. What is defined here holds for tokens on one axis.

    It is plain data that refers to modules of the stack: a runtime holds it, and is copied with its model.
    """

    #: Whether the caller passes the tokens one by one, as ids or embeddings, so that their order can be changed.
    takes_tokens: ClassVar[bool] = False
    #: Whether its tokens have places on several axes, whatever the positions of a call are.
    has_axes: ClassVar[bool] = False
    #: Whether the config states its length beside that of a text.
    has_own_length: ClassVar[bool] = False
    #: Whether layers are counted in the order in which modules are defined, and not in that of their paths.
    in_definition_order: ClassVar[bool] = False
    #: Numbers of axes that a tensor of its tokens may have.
    token_axes: ClassVar[tuple[int, ...]] = (3,)
    #: The convolution that makes tokens of the input, if it may stand among the layers.
    projection: Any = None
    #: Native mechanisms in attention that belong to the kind of tokens.
    biases: Any = ()

    # Finding it. These methods are asked of the class.

    @classmethod
    def recognises(cls, module: PreTrainedModel) -> bool:
        """Whether a stack, or a part of a model, has such tokens."""
        raise NotImplementedError

    @classmethod
    def find(cls, stack: Stack, modules: StackModules) -> Layout:
        """What a stack has for its tokens. The stack already has its attention layers."""
        raise NotImplementedError

    @classmethod
    def includes(cls, child: PreTrainedModel, stack: nn.Module) -> bool:
        """Whether a `PreTrainedModel` inside a stack belongs to it, and is not a stack of its own."""
        return False

    @classmethod
    def leaves_alone(cls, path: str) -> str | None:
        """Why an attention module at some path keeps its native positions; `None` if it is patched."""
        return None

    @classmethod
    def is_causal(cls, attention: nn.Module) -> bool | None:
        """Whether attention over such tokens is causal; `None` if that depends on the stack."""
        return None

    @classmethod
    def window_of(cls, attention: nn.Module, config: Any) -> tuple[int, ...] | None:
        """Sizes of the windows of tokens that an attention module states."""
        return None

    @classmethod
    def tables_in(cls, modules: StackModules) -> Iterable[tuple[str, nn.Module]]:
        """Path and module of every module of a stack that must have a forward of the scheme, besides attention."""
        return ()

    @classmethod
    def example(cls, module: PreTrainedModel, length: int, constant: bool) -> dict[str, Any]:
        """The arguments of a short run.

        Args:
            module: the stack, or the part of a model that holds it.
            length: number of tokens, where the arguments determine it.
            constant: whether all numbers of an image or a series are equal.

        Raises:
            NotRunnableError: if it is unknown what the module reads.
        """
        raise NotImplementedError

    # What discovery has found.

    def table(self, stack: Stack) -> Tensor | None:
        """The rows for tokens in its position table, `(rows, hidden)`; `None` without one."""
        raise NotImplementedError

    def vector_sites(self, stack: Stack) -> list[Any]:
        """What adds vectors of positions, each with `path` and `module`."""
        raise NotImplementedError

    def native_bias(self, attention: AttentionLayer) -> Tensor | None:
        """The native table of one of its `biases`."""
        return None

    def described(self, stack: Stack) -> tuple[list[str], list[str]]:
        """A line for each table, and for each mechanism in attention."""
        raise NotImplementedError

    def stated_length(self) -> str | None:
        """What determines the number of tokens, if that is the input and no length in the config."""
        return None

    # Observing it in a short run.

    def runs_alone(self, stack: Stack, model: nn.Module) -> bool:
        """Whether the stack is run without the model around it."""
        return False

    def is_comparable(self, stack: Stack, tokens: Tensor | None) -> bool:
        """Whether the input of the first layer, `(batch, length, hidden)`, shows whether equal tokens stay equal."""
        raise NotImplementedError

    def native_scheme(
        self, stack: Stack, rotations: Mapping[str, Rotation], anatomy: Anatomy, changes: TemporaryChanges
    ) -> Any:
        """The native scheme of the stack."""
        raise NotImplementedError

    # Placing a scheme.

    def check_parts(self, config: SchemeConfig, parts: SchemeParts) -> None:
        """Refuses parts that cannot encode such tokens."""

    def in_raster_order(self, parts: Iterable[Part]) -> list[str]:
        """What those parts do that number tokens with rows and columns one after the other."""
        return []

    def prepare(self, runtime: Any) -> None:
        """Tells the runtime of a stack what a call has to find out about its tokens."""

    def native_vectors(self, stack: Stack, additive: AdditiveEncoding) -> tuple[Tensor, str] | None:
        """The native table that a part can start from, in the order of its positions, and its path."""
        return None

    def install(self, stack: Stack, encoding: Any, journal: Any, report: Any) -> None:
        """Puts the vectors of a scheme in place of those of the architecture."""
        raise NotImplementedError

    def rotary_site(self, module: nn.Module, runtime: Any, *, unused: bool) -> Any:
        """The forward of a rotary module."""
        raise NotImplementedError


_KINDS: list[type[Layout]] = []


def register_layouts(*kinds: type[Layout]) -> None:
    """Registers kinds of tokens. They are asked in this order."""
    _KINDS.extend(kinds)


def layout_of(module: PreTrainedModel) -> type[Layout]:
    """The kind of tokens of a stack, or of a part of a model."""
    return next(kind for kind in _KINDS if kind.recognises(module))
