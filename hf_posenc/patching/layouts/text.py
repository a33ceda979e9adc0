"""Words: the caller passes them one by one, and their positions are counted on one axis."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES

from hf_posenc.patching.anatomy.anatomy import Anatomy, StackModules
from hf_posenc.patching.anatomy.architectures.example_inputs import numbers
from hf_posenc.patching.anatomy.discovery import WIDTHS, first_int
from hf_posenc.patching.anatomy.forward_code import forward_parameters, names_used
from hf_posenc.patching.anatomy.layout import Layout, TemporaryChanges
from hf_posenc.patching.anatomy.native_scheme import Rotation, declared_scheme, layer_schemes, several_tables
from hf_posenc.patching.anatomy.short_runs import NotRunnableError
from hf_posenc.patching.anatomy.sites import NamedModule, Stack
from hf_posenc.patching.anatomy.tables import position_tables, sinusoids_like, table_origin, table_weight
from hf_posenc.patching.call.rotary_site import RotaryModuleSite
from hf_posenc.patching.call.table_site import TableOwner, TableSite
from hf_posenc.schemes import LearnedConfig
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.parts import AdditiveEncoding

#: The first word of a short text: vocabularies often begin with tokens of another meaning. No text needs so many words.
_FIRST_WORD, _LAST_WORD = 5, 64
#: The projection of keys in cross-attention.
_CROSS_KEYS = re.compile(r"(cross_attn|cross_attention|encoder_attn|encoder_attention)\.k_proj$")


class OneAxis(Layout):
    """Tokens with positions on one axis, in a stack that may have ordinary position tables."""

    @classmethod
    def find(cls, stack: Stack, modules: StackModules) -> Layout:
        """Finds the tables."""
        stack.tables = [NamedModule(path, module) for path, module in position_tables(modules)]
        return cls()

    @classmethod
    def tables_in(cls, modules: StackModules) -> Iterable[tuple[str, nn.Module]]:
        """The tables."""
        return position_tables(modules)

    @property
    def computes_tables(self) -> bool:
        """Whether its tables are computed from a formula, even if they are trainable."""
        return False

    def table(self, stack: Stack) -> Tensor | None:
        """The rows for tokens of the first table."""
        return _weight(stack.tables[0])[table_origin(stack.tables[0].module) :] if stack.tables else None

    def vector_sites(self, stack: Stack) -> list[Any]:
        """The tables."""
        return [*stack.tables]

    def described(self, stack: Stack) -> tuple[list[str], list[str]]:
        """A line for each table."""
        tables = []
        for table in stack.tables:
            rows, columns = _weight(table).shape
            start = f"first token in row {table_origin(table.module)}"
            tables.append(f"{table.path} ({type(table.module).__name__}): {rows} x {columns}, {start}")
        return tables, []

    def native_scheme(
        self, stack: Stack, rotations: Mapping[str, Rotation], anatomy: Anatomy, changes: TemporaryChanges
    ) -> Any:
        """The scheme that is declared, or else that of the vectors and of the rotation of every layer."""
        declared = declared_scheme(stack)
        if declared is not None:
            return declared
        if len(stack.tables) > 1:
            raise several_tables(stack, [table.path for table in stack.tables])
        return layer_schemes(stack, self.vector_schemes(stack), rotations)

    def vector_schemes(self, stack: Stack) -> list[SchemeConfig]:
        """The schemes that add the same vectors as the architecture."""
        return [self._table_scheme(table) for table in stack.tables]

    def _table_scheme(self, table: NamedModule) -> SchemeConfig:
        weight, origin = _weight(table), table_origin(table.module)
        # A frozen table may have been computed from a formula. A trainable table counts as learned, whatever its
        # values, unless the architecture computes it and `from_pretrained` made it trainable.
        frozen = not weight.requires_grad or isinstance(weight, nn.Parameter) is False
        formula = sinusoids_like(weight.detach(), origin) if frozen or self.computes_tables else None
        return formula or LearnedConfig(num_positions=weight.shape[0] - origin, offset=origin)

    def native_vectors(self, stack: Stack, additive: AdditiveEncoding) -> tuple[Tensor, str] | None:
        """The rows of the first table from that of the first position on."""
        if not stack.tables:
            return None
        table = stack.tables[0]
        offset = max(getattr(part, "offset", 0) for part in additive.modules())
        return _weight(table)[max(table_origin(table.module) - offset, 0) :], table.path

    def install(self, stack: Stack, encoding: Any, journal: Any, report: Any) -> None:
        """Puts the vectors of a scheme in place of the rows of the tables."""
        for table in stack.tables:
            journal.set_forward(table.module, TableSite(table.module, encoding.runtime, encoding.additive))
            owner = stack.module.get_submodule(table.path.rpartition(".")[0])
            # Some owners read the weight of their table.
            if owner is not stack.module and {"weight", "shape"} <= names_used(type(owner).forward):
                journal.set_forward(owner, TableOwner(owner, table.path.rpartition(".")[2]))
            journal.freeze_all(table.module)
            report.replaced.append(f"{table.path}: position table ({type(table.module).__name__})")
            if encoding.additive is not None:
                report.placed.append(f"additive: {table.path}")

    def rotary_site(self, module: nn.Module, runtime: Any, *, unused: bool) -> Any:
        """Records the positions that the model passes to a rotary module."""
        return RotaryModuleSite(module, runtime, unused=unused)


class Text(OneAxis):
    """Words, or embeddings in their place. Every stack is taken for one of text that is of no other kind."""

    takes_tokens = True

    @classmethod
    def recognises(cls, module: PreTrainedModel) -> bool:
        """Any stack."""
        return True

    @classmethod
    def example(cls, module: PreTrainedModel, length: int, constant: bool) -> dict[str, Any]:
        """A few words."""
        parameters = forward_parameters(type(module))
        embedded = next((name for name in ("inputs_embeds", "hidden_states") if name in parameters), None)
        if "input_ids" not in parameters and embedded is not None:
            return {embedded: _embeddings(module, length)}
        if "input_ids" not in parameters:
            raise NotRunnableError(
                f"{type(module).__name__} does not take token ids, so it cannot be run to find out how it uses "
                f"positions (its arguments: {', '.join(list(parameters)[1:8])})."
            )
        tokens = _token_ids(module, length)
        # One question with one choice, which is a text, where a model reads `(batch, choices, length)`.
        known = MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values()
        chooses = any(kind.__name__ in known for kind in type(module).__mro__)
        given: dict[str, Any] = {"input_ids": tokens.unsqueeze(1) if chooses else tokens}
        if "use_cache" in parameters:
            given["use_cache"] = False
        width = _cross_attention_width(module) if "encoder_hidden_states" in parameters else None
        if width is not None:
            given["encoder_hidden_states"] = _embeddings(module, length, width)
        if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
            given["decoder_input_ids"] = tokens
        return given


def _weight(table: NamedModule) -> Tensor:
    weight = table_weight(table.module)
    assert weight is not None
    return weight


def _token_ids(module: PreTrainedModel, length: int) -> Tensor:
    """`(1, length)`: a text of words that the vocabularies have, with an end where the config states one."""
    config = module.config.get_text_config()
    stated = [getattr(config, name, None) for name in ("vocab_size", "decoder_vocab_size")]
    count = min([size for size in stated if isinstance(size, int)] or [_LAST_WORD])
    special = {name: value for name, value in config.to_dict().items() if name.endswith("_token_id")}
    reserved = {one for value in special.values() for one in (value if isinstance(value, list) else [value])}
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


def _cross_attention_width(model: PreTrainedModel) -> int | None:
    """Width of the encoder's output that a decoder reads; `None` if it has no cross-attention."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and _CROSS_KEYS.search(path):
            return module.in_features
    return None
