"""The name of a patched model: a string like any other, that `from_pretrained` can tell from that of the stock model.

Programs rebuild a model from `config._name_or_path` (TRL's trainers do, for the reference of DPO). The files of that
name know nothing of a scheme that was placed in memory, so the name has to.
"""

from __future__ import annotations

import weakref
from typing import Any

import yaml
from torch import nn
from transformers import PreTrainedModel
from yaml.representer import Representer, SafeRepresenter

from hf_posenc.entry import ATTRIBUTE
from hf_posenc.patching.place.encoding import PositionEncoding


class SchemeName(str):
    """A model's name or path, and the scheme that the model under this name has in memory.

    Equals the plain string, and is written as one into JSON and YAML. `str(name)` is the plain string, which names the
    files as they are. A copy of a config, pickled or not, keeps it; an unpickled one has lost the model it came from.

    Args:
        text: the name.
        entry: the scheme's dictionary; `None` for a model without a scheme, whose files have one.
        holder: the base model that holds the encoding; only referred to weakly. `None` where the files of the name hold
            the scheme and its parameters.
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
        """The encoding in force in the model that was named, if that model still exists and still has this scheme."""
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
        # A copy of a whole model gets a name of its own; a copy of its config alone keeps naming the original.
        holder = self.holder
        return type(self)(str(self), self.entry, memo.get(id(holder), holder), self.length)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.entry, None, self.length)


for _representer in (SafeRepresenter, Representer):
    yaml.add_representer(SchemeName, lambda dumper, name: dumper.represent_str(str(name)), Dumper=_representer)


def mark_names(model: PreTrainedModel, encoding: PositionEncoding) -> None:
    """Lets the names a model goes by tell its scheme, until the patch is undone. A model without a name stays so."""
    entry = encoding.config.to_dict()
    for target, attribute in _places(model):
        name = target.__dict__.get(attribute)
        if not isinstance(name, str) or not name:
            continue
        if isinstance(name, SchemeName) and name.entry is not None:  # the config was copied from a patched model's
            target.__dict__[attribute] = str(name)
        encoding.journal.set(target, attribute, SchemeName(str(name), entry, model.base_model, _length(encoding)))


def refresh_names(encoding: PositionEncoding) -> None:
    """Lets the names of a model tell the scheme it has now, after its config was exchanged in place."""
    for change in _marks(encoding):
        plain = str(change.target.__dict__[change.attribute])
        change.put(SchemeName(plain, encoding.config.to_dict(), encoding.__dict__["holder"], _length(encoding)))


def tell_length(encoding: PositionEncoding) -> None:
    """Lets the names of a model tell the length that was chosen for it after it was patched."""
    for change in _marks(encoding):
        name = change.target.__dict__[change.attribute]
        # The files of a plain name hold the scheme, but state the length that the model had when it was loaded.
        holder = name.holder if isinstance(name, SchemeName) else None
        change.put(SchemeName(str(name), encoding.config.to_dict(), holder, _length(encoding)))


def unmark_names(encoding: PositionEncoding) -> None:
    """Gives a model its plain names, for one whose files hold the scheme. Undoing the patch marks them as stock."""
    for change in _marks(encoding):
        plain = str(change.target.__dict__[change.attribute])
        change.put(plain)
        change.value = SchemeName(plain, None)


def _length(encoding: PositionEncoding) -> int | None:
    return None if encoding.lengths is None else encoding.lengths.chosen


def _marks(encoding: PositionEncoding) -> list[Any]:
    return [change for change in encoding.journal.changes if change.attribute in ("_name_or_path", "name_or_path")]


def _places(model: PreTrainedModel) -> list[tuple[Any, str]]:
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [(model.config, "_name_or_path"), *((module, "name_or_path") for module in models)]
