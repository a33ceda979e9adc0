"""The sequence lengths of a patched model, and all places in which they are written."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.patching.anatomy.anatomy import VISION, Anatomy, Stack, unwrapped
from hf_posenc.patching.anatomy.discovery import build_context
from hf_posenc.patching.place.config_entry import (
    NAMES,
    NATIVE_LENGTHS,
    SOURCE_NAMES,
    find_lengths,
    is_length,
    native_lengths,
    refresh_names,
    remember,
    write_lengths,
)
from hf_posenc.patching.place.encoding import PositionEncoding, current_encoding
from hf_posenc.schemes import from_rope_parameters, refusals
from hf_posenc.schemes.config import SchemeConfig, walk
from hf_posenc.schemes.parts import Reach

#: Lengths that modules copy.
_COPIED = ("max_source_positions", "max_target_positions")


@dataclass
class Lengths:
    """The lengths of a patched model, in tokens.

    Args:
        native: the length of the stock model, or `None` if neither its config nor a table has one.
        current: the length in config, generation config and report.
        reach: the longest sequence that the scheme can encode in this architecture.
        rows_before: number of table rows before that of the first token, if the length in the config includes them
            (RoBERTa: 514 rows for 512 tokens).
        chosen: the length that the user has chosen, or `None`. The current length is shorter if the scheme cannot
            encode the chosen one.
        names: the names in the config under which it is stated, as in `find_lengths`.
    """

    native: int | None
    current: int | None
    reach: Reach
    rows_before: int = 0
    chosen: int | None = None
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        current = "no stated length" if self.current is None else f"{self.current} tokens"
        native = "" if self.native in (None, self.current) else f", {self.native} natively"
        longest = "any length" if self.reach.length is None else f"at most {self.reach.length} tokens"
        made_for = self.reach.made_for
        intended = "" if made_for in (None, self.reach.length) else f", and its options are for {made_for}"
        return f"{current}{native}; the scheme supports {longest}{intended}"


def rows_of_tables(model: PreTrainedModel) -> int | None:
    """The number of positions of the shortest learned table of a stock model; `None` if it has no such table.

    It is also `None` for an architecture that cannot be patched. Its own forward then decides.
    """
    try:
        stacks = Anatomy(model).stacks()
    except UnsupportedError:
        return None
    tables = [table for stack in stacks for table in stack.tables if isinstance(table.module, nn.Embedding)]
    return min((table.weight.shape[0] - table.origin for table in tables), default=None)


def native_length(model: PreTrainedModel, stacks: list[Stack]) -> int | None:
    """The length of a stock model: that of its shortest table, or else the shortest in its config."""
    known = [build_context(stack, stack.attentions[0]).max_positions for stack in stacks]
    stated = [length for length in known if length is not None]
    return min(stated or _stated(model, stacks).values(), default=None) if stacks else None


def initialize_lengths(encoding: PositionEncoding, model: PreTrainedModel, stacks: list[Stack], main: str) -> None:
    """Determines the length of a model whose scheme has just been placed, and writes it to the config and the report.

    This is the length that the user has chosen; otherwise the length that the scheme was made for, if it is longer than
    the native length; otherwise the native length. It never exceeds the longest sequence that the scheme can encode.
    An encoder that reads features has its own length if the model has another main part.
    """
    by_part: dict[str | None, list[Stack]] = {}
    for stack in stacks:
        if stack.part != main and stack.layout.has_own_length and _stated(model, [stack]):
            by_part.setdefault(stack.part, []).append(stack)
    # The length of the model applies to its main part only, and not to images.
    by_part[None] = [stack for stack in stacks if stack.part == main and main != VISION]
    stated = (_stated(model, stacks_of_part) for stacks_of_part in by_part.values())
    remember(model.config, NATIVE_LENGTHS, functools.reduce(operator.or_, stated))
    before, encoding.record.lengths_by_part = encoding.record.lengths_by_part, {}
    for part, stacks_of_part in by_part.items():
        _initialize(encoding, model, stacks_of_part, before.get(part) if stacks_of_part else None, part)


def _initialize(
    encoding: PositionEncoding, model: PreTrainedModel, stacks: list[Stack], before: Lengths | None, part: str | None
) -> None:
    stated = _stated(model, stacks)
    native = native_length(model, stacks)
    reach = encoding.reach([stack.name for stack in stacks])
    tables = (table for stack in stacks for table in stack.tables)
    rows_before = next((table.origin for table in tables if table.weight.shape[0] in stated.values()), 0)
    lengths = Lengths(native, native, reach, rows_before, names=tuple(stated))
    wanted = native
    if before is not None and before.chosen is not None:
        wanted = lengths.chosen = before.chosen
    elif native is not None and reach.made_for is not None:
        is_native = _is_native_length(encoding.config, reach.made_for, stacks, native)
        wanted = native if is_native else max(native, reach.made_for)
    write_length(encoding, model, lengths, None if wanted is None else _within(reach, wanted), part)


def lengths_of(encoding: PositionEncoding, model: PreTrainedModel, part: str | None) -> tuple[Lengths, str | None]:
    """The lengths of a part, and its name if it is not the one that a model's length refers to.

    Raises:
        UnknownNameError: for a part that the model does not have.
        UnsupportedError: if the part is not patched, or has no length in the config.
    """
    known = encoding.record.lengths_by_part
    if part not in known:
        anatomy = Anatomy(model)
        part = None if anatomy.part(part) == anatomy.main else part
    if part in known:
        return known[part], part
    patched = {stack.part for stack in encoding.stacks.values()}
    reason = "its config states no length for it" if part in patched else "it is not patched"
    raise UnsupportedError(f"The length of the part {part!r} of this {type(model).__name__} cannot be set: {reason}.")


def set_length(encoding: PositionEncoding, model: PreTrainedModel, length: int, part: str | None = None) -> None:
    """Writes a length to the config, the generation config and the report of a patched model.

    Args:
        encoding: the encoding in force.
        model: the model.
        length: number of tokens.
        part: the part whose length is set; by default the one that a model's length refers to.

    Raises:
        SequenceLengthError: if the scheme cannot encode this length.
        UnsupportedError: if the part has no length that can be set.
    """
    before, part = lengths_of(encoding, model, part)
    reach = before.reach
    if reach.length is not None and length > reach.length:
        raise SequenceLengthError(
            f"A context of {length} tokens is longer than the {reach.length} positions {reach.remedy}"
        )
    try:
        write_length(encoding, model, dataclasses.replace(before, chosen=length), length, part)
    except BaseException:
        write_length(encoding, model, before, before.current, part)
        raise


def choose_length(encoding: PositionEncoding, model: PreTrainedModel, length: int) -> None:
    """Sets the length that was chosen for another model, limited to what the scheme can encode."""
    assert encoding.lengths is not None
    lengths = dataclasses.replace(encoding.lengths, chosen=length)
    write_length(encoding, model, lengths, _within(lengths.reach, length))


def apply_stated_lengths(encoding: PositionEncoding, model: PreTrainedModel, stated: Mapping[str, int]) -> None:
    """Applies the lengths in a config file, which may have been edited by hand."""
    for part, lengths in [*encoding.record.lengths_by_part.items()]:
        known = {path: length for path, length in stated.items() if path in lengths.names}
        changed = [length for path, length in known.items() if length != native_lengths(model.config).get(path)]
        if known:
            length = (changed or list(known.values()))[0] - lengths.rows_before
            if length != lengths.current:
                set_length(encoding, model, length, part)


def record_generation_length(encoding: PositionEncoding, model: PreTrainedModel) -> None:
    """Records in the journal that the maximum length of a loaded generation config was written by a patch."""
    lengths, generation_config = encoding.lengths, getattr(model, "generation_config", None)
    if lengths is None or lengths.native in (None, lengths.current) or generation_config is None:
        return
    if generation_config.max_length == lengths.current:
        generation_config.max_length = lengths.native
        encoding.record.journal.set(generation_config, "max_length", lengths.current)


def _within(reach: Reach, length: int) -> int:
    return length if reach.length is None else max(min(length, reach.length), 1)


def write_length(
    encoding: PositionEncoding, model: PreTrainedModel, lengths: Lengths, length: int | None, part: str | None = None
) -> None:
    """Writes a length everywhere. The encoding is updated last, so that an interrupted call can be repeated."""
    if length is not None:
        _write_configs(encoding, model, lengths, length)
    known = encoding.record.lengths_by_part
    known[part] = dataclasses.replace(lengths, current=length)
    if encoding.report is not None:
        others = [f"{name}: {other}" for name, other in known.items() if name is not None]
        shows_own = encoding.lengths is not None and (encoding.lengths.native or not others)
        encoding.report.context = "; ".join([str(encoding.lengths), *others] if shows_own else others)
    refresh_names(encoding)


def _write_configs(encoding: PositionEncoding, model: PreTrainedModel, lengths: Lengths, length: int) -> None:
    native = {path: known for path, known in native_lengths(model.config).items() if path in lengths.names}
    # If the model has its native length again, every name gets its native value. These may differ from each other.
    stated = native if length == lengths.native else dict.fromkeys(native, length + lengths.rows_before)
    if not all(map(is_length, stated.values())):
        raise SequenceLengthError(
            f"A context of {length} tokens cannot be stored in the config of {type(model).__name__}, where a length is "
            "at most 2147483647. Choose a shorter length, or a smaller factor of the scaling."
        )
    _write_attributes(encoding, model, native, stated)
    write_lengths(model.config, stated)
    generation_config = getattr(model, "generation_config", None)
    # In most generation configs, `max_length` limits the output. If it equals the length of the model, it follows it.
    stated_before = None if generation_config is None else generation_config.max_length
    if stated_before is not None and stated_before == lengths.current != length:
        encoding.record.journal.set(generation_config, "max_length", length)


def _write_attributes(
    encoding: PositionEncoding, model: PreTrainedModel, native: Mapping[str, int], stated: Mapping[str, int]
) -> None:
    """Writes a length to modules that keep a copy of it. Whisper refuses longer labels by its own copy."""
    journal = encoding.record.journal
    for path, length in stated.items():
        name = path.rpartition(".")[-1]
        written = {id(change.target) for change in journal.changes if change.attribute == name}
        for module in model.modules() if name in _COPIED else ():
            value = module.__dict__.get(name)
            if type(value) is int and value != length and (value == native[path] or id(module) in written):
                journal.set(module, name, length)


def _stated(model: PreTrainedModel, stacks: list[Stack]) -> dict[str, int]:
    if not stacks:
        return {}
    names = SOURCE_NAMES if all(stack.layout.has_own_length for stack in stacks) else NAMES
    configs = [stack.config for stack in stacks]
    return find_lengths(model.config, configs, names) or find_lengths(model.config, configs, NAMES)


def _is_native_length(config: SchemeConfig, made_for: int, stacks: list[Stack], native: int) -> bool:
    """Whether a length comes from a RoPE scaling in the stock config, which may exceed the stated length."""
    placed = {type(scaling) for part in walk(config) if (scaling := getattr(part, "scaling", None)) is not None}
    stated = [getattr(stack.config, "rope_parameters", None) or {} for stack in stacks]
    nested = [value for parameters in stated for value in parameters.values() if isinstance(value, dict)]
    for flat in nested or stated:
        try:
            scaling = getattr(from_rope_parameters(flat, native), "scaling", None)
        except (UnsupportedError, ValueError):
            continue  # No scheme of this library has such a scaling.
        if scaling is not None and scaling.made_for(native) == made_for and placed <= {type(scaling)}:
            return True
    return False


def context_length(model: Any) -> int | None:
    """The length of a patched model in tokens; `None` if it has none, or is not patched."""
    encoding = current_encoding(unwrapped(model))
    return None if encoding is None or encoding.lengths is None else encoding.lengths.current


def update_tokenizer_length(tokenizer: Any, model: Any, before: int | None = None) -> None:
    """Gives a tokenizer the length of a patched model, if it still has the native one or that of the scheme before.

    A scheme that was made for longer sequences, such as a scaled rotation, changes only the length of the model. This
    function is for tools that save a model together with its tokenizer, which is changed in place.

    Args:
        tokenizer: the tokenizer of the model, or a processor that holds one. `None`, or a processor without a length,
            such as one for images or sound, is not changed.
        model: patched or not.
        before: the `context_length` of the model before it got its scheme.
    """
    encoding, length = current_encoding(unwrapped(model)), context_length(model)
    if encoding is None or encoding.lengths is None or length is None:
        return
    holder = getattr(tokenizer, "tokenizer", tokenizer)
    known = {encoding.lengths.native, before} - {None}
    if getattr(holder, "model_max_length", None) in known:
        holder.model_max_length = length


def is_length_dependent(encoding: PositionEncoding) -> bool:
    """Whether a part needs more than a growing cache stores. Only causal stacks have growing caches."""
    growing = [stack for stack in encoding.stacks.values() if any(layer.causal for layer in stack.layers)]
    return any(stack.problems[refusals.GROWING_CACHE.name] for stack in growing)
