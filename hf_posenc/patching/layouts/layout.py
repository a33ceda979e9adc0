"""The kinds of tokens that a stack may have: words, patches on a grid, frames of a series.

There is one class for each kind. It answers all questions that depend on the kind, so no other code asks for the kind.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES

from hf_posenc.patching.anatomy.anatomy import Stack
from hf_posenc.patching.anatomy.architectures.example_inputs import numbers
from hf_posenc.patching.anatomy.discovery import WIDTHS, first_int
from hf_posenc.patching.anatomy.formulas import sinusoids_like
from hf_posenc.patching.anatomy.native_scheme import Rotation, declared_scheme, layer_schemes, several_tables
from hf_posenc.patching.anatomy.short_runs import unknown_inputs
from hf_posenc.patching.anatomy.sites import AttentionLayer, PositionTable
from hf_posenc.patching.call.forward_state import ForwardState
from hf_posenc.patching.call.module_sites import TableOwner, TableSite
from hf_posenc.patching.forwards import forward_parameters, is_of_transformers, names_used
from hf_posenc.schemes import LearnedConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.parts import AdditiveEncoding, Part

if TYPE_CHECKING:
    from hf_posenc.patching.place.transaction import Transaction


class Layout:
    """The tokens of one stack. The methods of this class apply to tokens on one axis, with ordinary position tables.

    It is plain data that refers to modules of the stack: a runtime holds it, and is copied with its model.
    """

    #: Whether its tokens have places on several axes, whatever the positions of a call are.
    has_axes: ClassVar[bool] = False
    #: Whether the caller passes the tokens one by one, as ids or embeddings, so that their order can be changed.
    takes_tokens: ClassVar[bool] = False
    #: Whether the config states its length in addition to that of a text.
    has_own_length: ClassVar[bool] = False
    #: Path of attention that keeps its native positions, as a regular expression, and why.
    left_alone: ClassVar[tuple[str, str] | None] = None
    #: Numbers of axes that a tensor of its tokens may have.
    token_axes: ClassVar[tuple[int, ...]] = (3,)
    #: Arguments that hold features and not tokens, so that their shape does not show the number of tokens.
    features: ClassVar[tuple[str, ...]] = ()
    #: The convolution that makes tokens of the input, if it may be among the layers.
    projection: Any = None
    #: The position tables that modules own and add themselves.
    tables: Any = ()
    #: The properties of an encoder that accepts one number of frames only, and computes the table for them.
    fixed_input: Any = None
    #: Native mechanisms in attention that belong to the kind of tokens.
    biases: Any = ()

    # Discovery. These methods are called on the class.

    @classmethod
    def recognises(cls, module: PreTrainedModel) -> bool:
        """Whether a stack, or a part of a model, has such tokens. With `input_ids`, only `Text` is asked."""
        raise NotImplementedError

    @classmethod
    def find(cls, stack: Stack) -> Layout:
        """Finds what the tokens of a stack are."""
        return cls()

    @classmethod
    def includes(cls, child: PreTrainedModel, stack: nn.Module) -> bool:
        """Whether a `PreTrainedModel` inside a stack belongs to it, and is not a separate stack."""
        return False

    @classmethod
    def is_causal(cls, attention: nn.Module) -> bool | None:
        """Whether attention over such tokens is causal; `None` if that depends on the stack."""
        return None

    @classmethod
    def window_of(cls, attention: nn.Module, config: Any) -> tuple[int, ...] | None:
        """Sizes of the windows of tokens that an attention module states."""
        return None

    @classmethod
    def example(cls, module: PreTrainedModel, length: int) -> dict[str, Any]:
        """The arguments of a short run.

        Args:
            module: the stack, or the part of a model that holds it.
            length: number of tokens, where the arguments determine it.

        Raises:
            NotRunnableError: if it is unknown what the module reads.
        """
        raise NotImplementedError

    # Results of discovery.

    def table(self, stack: Stack) -> Tensor | None:
        """The rows for tokens in its first table, `(rows, hidden)`; `None` without one."""
        table = next(iter((*stack.tables, *self.tables)), None)
        return None if table is None else table.weight[table.origin :]

    def vector_sites(self, stack: Stack) -> list[Any]:
        """The objects that add position vectors, each with `path` and `module`: one table of every module."""
        return list({id(table.module): table for table in (*stack.tables, *self.tables)}.values())

    def native_bias(self, stack: Stack, attention: AttentionLayer) -> Tensor | None:
        """The native table of relative biases that one layer uses, or `None`."""
        if attention.relative is not None:
            return attention.relative.weight
        declared = stack.architecture.bias_table
        return None if declared is None else declared(stack, attention)

    def described(self, stack: Stack) -> tuple[list[str], list[str]]:
        """A line for each table, and for each mechanism in attention."""
        tables = []
        for table in stack.tables:
            rows, columns = table.weight.shape
            start = f"first token in row {table.origin}"
            tables.append(f"{table.path} ({type(table.module).__name__}): {rows} x {columns}, {start}")
        return tables, []

    def stated_length(self) -> str | None:
        """Describes what determines the number of tokens, if it is the input and not a length in the config."""
        return None

    # Observing it in a short run.

    def runs_alone(self, stack: Stack, model: nn.Module) -> bool:
        """Whether the stack is run without the model around it."""
        return False

    def is_comparable(self, stack: Stack, tokens: Tensor | None) -> bool:
        """Whether the input of the first layer, `(batch, length, hidden)`, shows whether equal tokens stay equal."""
        raise NotImplementedError

    def native_scheme(self, stack: Stack, rotations: Mapping[str, Rotation], trial: Transaction) -> Any:
        """The native scheme: what is declared, or else that of the vectors and of the rotation of every layer."""
        declared = declared_scheme(stack)
        if declared is not None:
            return declared
        if len(stack.tables) > 1:
            raise several_tables(stack, [table.path for table in stack.tables])
        return layer_schemes(stack, self.vector_schemes(stack), rotations)

    def vector_schemes(self, stack: Stack) -> list[SchemeConfig]:
        """The schemes that add the same vectors as the architecture."""
        return [self._table_scheme(table) for table in stack.tables]

    def _table_scheme(self, table: PositionTable) -> SchemeConfig:
        weight, origin = table.weight, table.origin
        # A frozen table may have been computed from a formula. A trainable table counts as learned, whatever its
        # values, unless the architecture computes it and `from_pretrained` made it trainable (Whisper's encoder).
        frozen = not weight.requires_grad or isinstance(weight, nn.Parameter) is False
        formula = sinusoids_like(weight.detach(), origin) if frozen or self.fixed_input is not None else None
        return formula or LearnedConfig(num_positions=weight.shape[0] - origin, offset=origin)

    # Finding out about the tokens of a call.

    def state_of_call(self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardState:
        """The places of tokens on several axes, as far as the arguments of a call show them."""
        raise NotImplementedError

    # Placing a scheme.

    def in_raster_order(self, parts: Iterable[Part]) -> list[str]:
        """The effects of the parts that number tokens in order although the tokens have rows and columns."""
        return []

    def native_vectors(self, stack: Stack, additive: AdditiveEncoding) -> tuple[Tensor, str] | None:
        """The native table that a part can start from, in the order of its positions, and its path."""
        table = next(iter((*stack.tables, *self.tables)), None)
        if table is None:
            return None
        offset = max(getattr(part, "offset", 0) for part in additive.modules())
        return table.weight[max(table.origin - offset, 0) :], table.full_name

    def install(self, stack: Stack, encoding: Any, journal: Any, report: Any) -> None:
        """Replaces the vectors of the architecture, the rows of the tables, by those of a scheme."""
        for table in stack.tables:
            site = TableSite(table, encoding.runtime, encoding.additive)
            journal.set_forward(table.module, site)
            owner = stack.module.get_submodule(table.path.rpartition(".")[0])
            # Some owners read the weight of their table.
            if owner is not stack.module and {"weight", "shape"} <= names_used(type(owner).forward):
                journal.set_forward(owner, TableOwner(owner, table.path.rpartition(".")[2]))
            journal.freeze_all(table.module)
            report.replaced.append(f"{table.path}: position table ({type(table.module).__name__})")
            if encoding.additive is not None:
                report.placed.append(f"additive: {table.path}")


#: The first word of a short text: vocabularies often begin with tokens of another meaning. No text needs more words.
_FIRST_WORD, _LAST_WORD = 5, 64
#: The projection of keys in cross-attention.
_CROSS_KEYS = re.compile(
    r"(cross_attn|cross_attention|encoder_attn|encoder_attention)\.k_proj$|crossattention\.(attention|self)\.key$"
)
#: Arguments that take vectors instead of tokens.
_EMBEDDINGS = ("inputs_embeds", "query_embeds", "hidden_states")


class Text(Layout):
    """Words, or embeddings in their place. Every stack of no other kind counts as text."""

    takes_tokens = True

    @classmethod
    def includes(cls, child: PreTrainedModel, stack: nn.Module) -> bool:
        """In other code, layers and their encoder may be `PreTrainedModel`s that receive embeddings."""
        other = not is_of_transformers(type(child).__module__)
        return other and [*forward_parameters(type(child))][1:2] in (["hidden_states"], ["x"])

    @classmethod
    def recognises(cls, module: PreTrainedModel) -> bool:
        """Any stack."""
        return True

    @classmethod
    def example(cls, module: PreTrainedModel, length: int) -> dict[str, Any]:
        """A few words."""
        parameters = forward_parameters(type(module))
        if "input_ids" not in parameters:
            embedded = next((name for name in _EMBEDDINGS if name in parameters), None)
            if embedded is None:
                raise unknown_inputs(module, "does not take token ids")
            return {embedded: _embeddings(module, length)} | _encoded(module, length)
        tokens = _token_ids(module, length)
        # A multiple-choice model reads `(batch, choices, length)`. It gets a single choice, which is a text.
        known = MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values()
        chooses = any(kind.__name__ in known for kind in type(module).__mro__)
        given: dict[str, Any] = {"input_ids": tokens.unsqueeze(1) if chooses else tokens}
        given |= _encoded(module, length)
        if "attention_mask" in parameters and not is_of_transformers(type(module).__module__):
            given["attention_mask"] = torch.ones_like(given["input_ids"])  # Other code may require it.
        if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
            given["decoder_input_ids"] = tokens
        return given


def _token_ids(module: PreTrainedModel, length: int) -> Tensor:
    """`(1, length)`: a text of words that the vocabularies have, with an end where the config states one."""
    config = module.config.get_text_config()
    stated = [getattr(config, name, None) for name in ("vocab_size", "decoder_vocab_size")]
    count = min([size for size in stated if isinstance(size, int)] or [_LAST_WORD])
    special = {name: value for name, value in config.to_dict().items() if name.endswith("_token_id")}
    reserved = {token_id for value in special.values() for token_id in (value if isinstance(value, list) else [value])}
    words = [*range(_FIRST_WORD, min(count, _LAST_WORD)), *range(min(count, _FIRST_WORD))]
    words = [word for word in words if word not in reserved] or words
    ids = list(itertools.islice(itertools.cycle(words), length))
    end = special.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if isinstance(end, int) and 0 <= end < count:
        ids[-1] = end
    return torch.tensor([ids])


def _embeddings(model: PreTrainedModel, length: int, width: int | None = None) -> Tensor:
    """`(1, length, hidden)` in place of the embeddings of a stack, or of another width."""
    return numbers(1, length, first_int(model.config, WIDTHS) if width is None else width)


def _encoded(module: PreTrainedModel, length: int) -> dict[str, Any]:
    """The output of an encoder, for a module that attends to it."""
    name = "encoder_hidden_states"
    reads = name in forward_parameters(type(module))
    for path, projection in module.named_modules() if reads else ():
        if isinstance(projection, nn.Linear) and _CROSS_KEYS.search(path):
            return {name: _embeddings(module, length, projection.in_features)}
    return {}
