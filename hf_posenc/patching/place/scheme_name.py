"""The name of a patched model: a string that also carries the scheme, for `from_pretrained`.

Programs rebuild a model from `config._name_or_path`, for example TRL's trainers for the reference model of DPO. The
files under that name do not contain a scheme that was placed in memory, so the name itself carries it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import yaml
from torch import nn
from transformers import PreTrainedModel
from yaml.representer import Representer, SafeRepresenter

from hf_posenc.entry import ATTRIBUTE
from hf_posenc.patching.place.encoding import PositionEncoding


class SchemeName(str):
    """A model's name or path, together with the scheme of the model in memory.

    It equals the plain string, and is written as a plain string to JSON and YAML. `str(name)` is the plain string,
    which refers to the files without the scheme. A copied or pickled config keeps the scheme, but after unpickling the
    reference to the model is lost.

    Args:
        text: the name.
        entry: the scheme's dictionary; `None` for a model that was unpatched, but whose files have a scheme.
        holder: the base model that holds the encoding, stored as a weak reference. `None` if the files under this name
            contain the scheme and its parameters.
        length: the context length that was chosen for the model, or `None`.
    """

    entry: dict[str, Any] | None
    length: int | None

    def __new__(  # noqa: D102
        cls, text: str, entry: dict[str, Any] | None, holder: nn.Module | None = None, length: int | None = None
    ) -> SchemeName:
        name = super().__new__(cls, text)
        name.entry = entry
        name.length = length
        name._holder = None if holder is None else weakref.ref(holder)  # type: ignore[attr-defined]
        return name

    def encoding(self) -> PositionEncoding | None:
        """The encoding in force in the model, if the model still exists and still has this scheme."""
        holder = self.holder
        encoding = None if holder is None else holder._modules.get(ATTRIBUTE)
        same = isinstance(encoding, PositionEncoding) and encoding.config.to_dict() == self.entry
        return encoding if same else None  # type: ignore[return-value]

    @property
    def holder(self) -> nn.Module | None:
        """The base model, if it still exists."""
        reference: Any = self.__dict__["_holder"]
        return None if reference is None else reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> SchemeName:
        # The name of a copied model refers to the copy. The name of a copied config still refers to the original model.
        holder = self.holder
        return type(self)(str(self), self.entry, memo.get(id(holder), holder), self.length)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.entry, None, self.length)


for _representer in (SafeRepresenter, Representer):
    yaml.add_representer(SchemeName, lambda dumper, name: dumper.represent_str(str(name)), Dumper=_representer)
# `torch.load` reads only types that it knows.
torch.serialization.add_safe_globals([SchemeName])


def mark_names(model: PreTrainedModel, encoding: PositionEncoding) -> None:
    """Adds the scheme to the names of a model, until the patch is undone. A model without a name is not changed."""
    entry = encoding.config.to_dict()
    for target, attribute in _places(model):
        name = target.__dict__.get(attribute)
        if not isinstance(name, str) or not name:
            continue
        if isinstance(name, SchemeName) and name.entry is not None:  # the config was copied from a patched model's
            target.__dict__[attribute] = str(name)
        encoding.record.journal.set(
            target, attribute, SchemeName(str(name), entry, model.base_model, _length(encoding))
        )


def refresh_names(encoding: PositionEncoding, *, scheme_changed: bool = False) -> None:
    """Updates the names of a model after its length, or the config of its encoding, was changed.

    Args:
        encoding: the encoding in force.
        scheme_changed: whether the files under a plain name, which contain the scheme and its parameters, have another
            scheme.
    """
    for change in _marks(encoding):
        name = change.target.__dict__[change.attribute]
        holder = encoding.__dict__["holder"] if scheme_changed else getattr(name, "holder", None)
        change.put(SchemeName(str(name), encoding.config.to_dict(), holder, _length(encoding)))


def unmark_names(encoding: PositionEncoding) -> None:
    """Restores plain names, for a model whose files contain the scheme. Undoing the patch marks them as unpatched."""
    for change in _marks(encoding):
        plain = str(change.target.__dict__[change.attribute])
        change.put(plain)
        change.value = SchemeName(plain, None)


def _length(encoding: PositionEncoding) -> int | None:
    return None if encoding.lengths is None else encoding.lengths.chosen


def _marks(encoding: PositionEncoding) -> list[Any]:
    names = ("_name_or_path", "name_or_path")
    return [change for change in encoding.record.journal.changes if change.attribute in names]


def _places(model: PreTrainedModel) -> list[tuple[Any, str]]:
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [(model.config, "_name_or_path"), *((module, "name_or_path") for module in models)]
