"""Docstrings in the reference: every field of a dataclass with type, default and meaning; links to papers."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import hf_posenc
from hf_posenc.cli.catalogue import meanings_of
from hf_posenc.schemes import SchemeConfig

_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def meanings(cls: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its base classes say about its fields, by name."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if dataclasses.is_dataclass(owner) and owner.__doc__:
            found |= meanings_of(inspect.cleandoc(owner.__doc__))
    return found


def default(field: dataclasses.Field[Any]) -> str:
    """The default of a field as code, or an empty text if there is none."""
    made = field.default_factory is not dataclasses.MISSING
    value = field.default_factory() if made else field.default
    if value is dataclasses.MISSING:
        return ""
    return value.label if isinstance(value, SchemeConfig) else repr(value).replace("'", '"')


def constructor_signature(_: Sphinx, what: str, __: str, obj: Any, *___: Any) -> tuple[str, None] | None:
    """The fields of a dataclass. Configs have a `__new__`, whose signature says nothing."""
    if what != "class" or not dataclasses.is_dataclass(obj):
        return None
    shown = [f"{one.name}={default(one)}" if default(one) else one.name for one in dataclasses.fields(obj) if one.init]
    return f"({', '.join(shown)})", None


def comments_as_written() -> tuple[Callable[..., None], Callable[..., None]]:
    """Handlers before and behind Napoleon, which takes what comes before a colon for the type of an attribute."""
    kept: dict[str, list[str]] = {}

    def keep(_: Sphinx, what: str, name: str, __: Any, ___: Any, lines: list[str]) -> None:
        if what in ("attribute", "data", "property"):
            kept[name] = list(lines)

    def restore(_: Sphinx, __: str, name: str, ___: Any, ____: Any, lines: list[str]) -> None:
        lines[:] = kept.pop(name, lines)

    return keep, restore


def describe_fields(app: Sphinx, what: str, _: str, obj: Any, __: Any, lines: list[str]) -> None:
    """Adds types and defaults to the fields of a dataclass, and the fields that its base classes describe."""
    if what != "class" or not dataclasses.is_dataclass(obj):
        return
    if app.env.current_document.docname.startswith("reference/schemes/") and "" in lines:
        # The page begins with the first paragraph.
        del lines[: lines.index("") + 1]
    fields = [one for one in dataclasses.fields(obj) if one.init]
    described = {line.split(":")[1].removeprefix("param ") for line in lines if line.startswith(":param ")}
    first = next((at for at, line in enumerate(lines) if line.startswith(":param ")), len(lines))
    found = meanings(obj)
    missing = [f":param {one.name}: {found.get(one.name, '')}" for one in fields if one.name not in described]
    types = [f":type {one.name}: {_type(one)}" for one in fields]
    lines[first:first] = ["", *missing, *types]


def _type(field: dataclasses.Field[Any]) -> str:
    declared = field.type if isinstance(field.type, str) else field.type.__name__
    names = [name for name in re.findall(r"\w+", declared) if name in hf_posenc.__all__]
    linked = re.sub(rf"\b({'|'.join(names)})\b", r":py:obj:`~hf_posenc.\1`", declared) if names else f"``{declared}``"
    return f"{linked}, default ``{default(field)}``" if default(field) else f"{linked}, required"


class TextDetails(SphinxTransform):
    """Makes links of arXiv ids, and a dash behind the name of a parameter."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        """Replaces texts outside code and links."""
        for text in list(self.document.findall(nodes.Text)):
            parents = (nodes.literal, nodes.literal_block, nodes.reference, nodes.title, nodes.raw)
            if text.astext() == " -- ":
                # Sphinx leaves this to smart quotes, which would also change the hyphens of options.
                text.parent.replace(text, nodes.Text(" – "))
                continue
            pieces = _ARXIV.split(text.astext())
            if len(pieces) == 1 or isinstance(text.parent, parents):
                continue
            new: list[nodes.Node] = []
            for at, piece in enumerate(pieces):
                address = f"https://arxiv.org/abs/{piece}"
                new.append(nodes.reference("", f"arXiv:{piece}", refuri=address) if at % 2 else nodes.Text(piece))
            text.parent.replace(text, new)


def mend_back_links(app: Sphinx, pagename: str, _: str, context: dict[str, Any], __: Any) -> None:
    """Corrects links from source code to the reference.

    viewcode takes all names of a module to be documented below one package, which they need not be.
    """
    names = app.env.domains.python_domain.objects

    def mended(match: re.Match[str]) -> str:
        last = match.group(1).rpartition(".")[2]
        others = [entry.node_id for name, entry in names.items() if name.endswith(f".{last}") and not entry.aliased]
        return match.group(0) if match.group(1) in names or not others else f'#{others[0]}">[docs]'

    if pagename.startswith("_modules/"):
        context["body"] = re.sub(r'#([\w.]+)">\[docs\]', mended, context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    app.add_transform(TextDetails)
    app.connect("html-page-context", mend_back_links)
    app.connect("autodoc-process-signature", constructor_signature)
    keep, restore = comments_as_written()
    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    # Behind Napoleon, which makes a field list of the section "Args".
    app.connect("autodoc-process-docstring", describe_fields, priority=600)
    return {"parallel_read_safe": True}
