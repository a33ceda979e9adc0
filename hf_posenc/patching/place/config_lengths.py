"""The sequence lengths in a model's config, and their native values before a patch.

A stock class creates its position tables with the lengths in its config, and a patched model keeps the weights of these
tables. If a patch changes a length in the config, the entry therefore stores the native value, with which the stock
class is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from hf_posenc.entry import ATTRIBUTE, read_fields
from hf_posenc.patching.anatomy.parts import SOURCE_LENGTH
from hf_posenc.schemes.reach import Reach

#: The field of an entry with the native lengths, `{"max_position_embeddings": 512}`; a dot separates sub-configs.
NATIVE_LENGTHS = "native_lengths"
#: Names of config attributes for the maximum sequence length.
NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "model_max_length",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "max_target_positions",
)
#: Names for the length of an encoder that reads features.
SOURCE_NAMES = (SOURCE_LENGTH,)


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
        return f"{current}{native}; the scheme supports {longest}"


def is_length(value: Any) -> bool:
    """Whether a value is a context length in tokens that a config can state."""
    return type(value) is int and 0 < value < 2**31


def find_lengths(
    config: PreTrainedConfig, stack_configs: Iterable[Any] = (), names: Iterable[str] = NAMES
) -> dict[str, int]:
    """The lengths in a config by name, including those of sub-configs that a stack uses."""
    used = [id(found) for found in stack_configs]
    owners = {"": config} | {
        f"{name}.": value
        for name, value in config.__dict__.items()
        if isinstance(value, PreTrainedConfig) and id(value) in used
    }
    return {
        path + name: owner.__dict__[name]
        for path, owner in owners.items()
        for name in names
        if is_length(owner.__dict__.get(name))
    }


def native_lengths(config: Any) -> dict[str, int]:
    """The lengths in the config before it was patched; empty for a stock config."""
    return (read_fields(config) or {}).get(NATIVE_LENGTHS, {})


def stated_lengths(config: Any) -> dict[str, int]:
    """The current lengths in the config, under the same names."""
    return {path: getattr(*_place(config, path)) for path in native_lengths(config)}


def remember(config: Any, field: str, values: Mapping[str, Any]) -> None:
    """Stores native values in a field of the entry of a config."""
    setattr(config, ATTRIBUTE, {**(read_fields(config) or {}), field: dict(values)})


def write_lengths(config: Any, lengths: Mapping[str, int]) -> None:
    """Writes lengths to a config."""
    for path, length in lengths.items():
        setattr(*_place(config, path), length)


@contextmanager
def at_native_lengths(config: Any) -> Iterator[None]:
    """Context manager in which the config has its native lengths."""
    stated = stated_lengths(config)
    write_lengths(config, native_lengths(config))
    try:
        yield
    finally:
        write_lengths(config, stated)


def _place(config: Any, path: str) -> tuple[Any, str]:
    *outer, name = path.split(".")
    for attribute in outer:
        config = getattr(config, attribute)
    return config, name
