"""Whether weights belong to the scheme of the model that they are loaded into.

A state dict, a file, the shards of an index, a checkpoint of `Trainer` and a distributed checkpoint name the schemes of
their weights in the same way. `NamedSchemes` compares them with those of a model, and `stored_weights.py` reads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.entry import MARK, find_mark, find_marks
from hf_posenc.patching.place.encoding import PositionEncoding, encodings
from hf_posenc.patching.place.record import disagreement, marked_scheme
from hf_posenc.schemes.config import SchemeConfig


class SchemeMismatchError(CheckpointError, RuntimeError):
    """The weights were trained with a position encoding that differs from that of the model.

    It is also a `RuntimeError`, like torch's error for a state dict that does not match.
    """


@dataclass(frozen=True)
class NamedSchemes:
    """The schemes that weights name.

    Attributes:
        weights: where the weights are, for messages.
        schemes: the schemes by the keys of their marks; empty for weights of a stock model.
    """

    weights: str
    schemes: Mapping[str, dict[str, Any]]

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], weights: str = "this state dict") -> NamedSchemes:
        """The schemes that a state dict names."""
        return cls(weights, {key: marked_scheme(state_dict[key]) for key in find_marks(state_dict)})

    def check(self, model: nn.Module, remedy: str = "", *, reader: str = "") -> None:
        """Compares the schemes with those of a model, before anything is copied.

        Args:
            model: any module; unpatched models have stock positions.
            remedy: sentences appended to the message.
            reader: what has read the config that the model was built from, as in `disagreement`.

        Raises:
            SchemeMismatchError: naming both schemes, if they differ.
        """
        found = encodings(model)
        places = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if module in found]
        if len(found) == 1 and len(self.schemes) <= 1:  # Several paths may lead to one model.
            places = places[:1]
        placed = {f"{path}.{MARK}": module.config for path, module in places if isinstance(module, PositionEncoding)}
        self.compare(placed, f"this {type(model).__name__}", remedy, reader)

    def compare(self, placed: Mapping[str, SchemeConfig], target: str, remedy: str = "", reader: str = "") -> None:
        """Compares the schemes with those in force, by the keys of their marks.

        Raises:
            SchemeMismatchError: naming both schemes, if they differ.
        """
        pairs = [(self.schemes.get(key), placed.get(key)) for key in {**placed, **self.schemes}]
        if len(placed) <= 1 and len(self.schemes) <= 1:  # A model inside another module has prefixed keys.
            pairs = [(next(iter(self.schemes.values()), None), next(iter(placed.values()), None))]
        problem = next(filter(None, (disagreement(*pair, reader) for pair in pairs)), None)
        if problem is not None:
            raise SchemeMismatchError(f"The weights in {self.weights} do not belong to {target}: {problem}.{remedy}")


def check_loaded_mark(model: Any, info: Mapping[str, Any], source: str, entry_format: int) -> None:
    """Compares the scheme named by a folder's weights with the scheme in its config.

    Args:
        model: the model that was just loaded.
        info: transformers' loading info.
        source: path or hub id, for messages.
        entry_format: format of the folder's config; weights of format 1 do not name a scheme.

    Raises:
        SchemeMismatchError: if they differ, or if the weights should name a scheme but do not.
    """
    (encoding,) = encodings(model)
    found, absent = encoding.loaded_scheme(), find_mark(info.get("missing_keys", ())) is not None
    if absent and entry_format < 2:
        warn_of_older_version(source)
    elif found is not None or absent:  # Else the weights stay on disk or come from another process.
        NamedSchemes(source, {} if found is None or absent else {MARK: found}).check(
            model,
            " Restore the config.json that was saved with them, or pass no `config`. To give them another scheme, load "
            "them with their own config and call patch_model.",
            reader="from_pretrained",
        )


def warn_of_older_version(source: Any) -> None:
    """Warns that weights of format 1 cannot be compared with their config."""
    warnings.warn(
        f"{source} was saved by an older hf_posenc, whose weights do not name their scheme, so it cannot be checked "
        "whether they belong to this config. Save the model again to store the scheme with the weights.",
        UserWarning,
        stacklevel=5,
    )
