"""What `hf-posenc schemes` lists, read from the source files: importing the schemes would import torch first."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.schemes.config import SchemeConfig

REQUIRED = "required"


@dataclass(frozen=True)
class Option:
    """One option of a scheme.

    Args:
        name: as it is typed.
        type: as it is annotated.
        default: JSON-ready; "required" where there is none.
        text: the default as it is typed: a nested scheme is its name.
    """

    name: str
    type: str
    default: Any
    text: str


@dataclass(frozen=True)
class Entry:
    """One scheme or arrangement.

    Args:
        name: of the scheme.
        path: module and class.
        documentation: docstring of the class.
        arrangement: whether it arranges other schemes.
        options: in the order of the constructor.
    """

    name: str
    path: str
    documentation: str
    arrangement: bool
    options: tuple[Option, ...]

    @property
    def summary(self) -> str:
        """The first paragraph of the documentation in one line."""
        return " ".join(self.documentation.split("\n\n")[0].split())

    def meanings(self) -> dict[str, str]:
        """What the documentation says about each option, in one line."""
        return meanings_of(self.documentation)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        options = {option.name: option.default for option in self.options}
        return {"name": self.name, "summary": self.summary, "arrangement": self.arrangement, "options": options}


def meanings_of(documentation: str) -> dict[str, str]:
    """What the "Args" section of a docstring, without its indent, says about each argument, in one line."""
    _, _, section = documentation.partition("\nArgs:\n")
    meanings: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        indent = len(line) - len(line.lstrip())
        if indent == 4 and ":" in line:
            name, _, text = line.strip().partition(":")
            meanings[name] = text.strip()
        elif name:
            meanings[name] = f"{meanings[name]} {line.strip()}".strip()
    return meanings


def entries() -> list[Entry]:
    """All schemes by name, the schemes first and then the arrangements: those of others too if any were registered."""
    # Without this package nothing can have been registered.
    if "hf_posenc.schemes" in sys.modules:
        return registered()
    try:
        return shipped()
    except NotLiteralError:
        return registered()


def registered() -> list[Entry]:
    """All registered schemes. Imports torch."""
    from hf_posenc.schemes import registered_configs

    return _in_order(_entry(found) for found in registered_configs())


def shipped() -> list[Entry]:
    """The schemes of this package, without importing them.

    Raises:
        NotLiteralError: for an option whose default is not written out in the source.
    """
    return _in_order(_Sources().entries())


def _in_order(entries: Any) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.arrangement, entry.name))


def _entry(found: type[SchemeConfig]) -> Entry:
    from hf_posenc.schemes.option_types import kind_of

    options = []
    for field in dataclasses.fields(found):
        value: Any = REQUIRED
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        plain = value.to_dict() if hasattr(value, "to_dict") else value
        options.append(Option(field.name, kind_of(field), plain, _as_typed(plain)))
    path = f"{found.__module__}.{found.__name__}"
    return Entry(found.name, path, inspect.getdoc(found) or "", found.combinator, tuple(options))


def _as_typed(value: Any) -> str:
    return str(value["scheme"]) if isinstance(value, dict) and "scheme" in value else str(value)


def _is_class_variable(field: ast.AnnAssign) -> bool:
    return ast.unparse(field.annotation).startswith("ClassVar")


class NotLiteralError(Exception):
    """A default that only running the source would show."""


class _Sources:
    """The classes below `hf_posenc/schemes`."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parents[1]
        self.classes: dict[str, tuple[str, ast.ClassDef]] = {}
        for path in sorted((root / "schemes").rglob("*.py")):
            module = ".".join((root.name, *path.relative_to(root).with_suffix("").parts))
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = (module, node)

    def entries(self) -> list[Entry]:
        return [
            Entry(
                name=self._class_variable(class_name, "name"),
                path=f"{module}.{class_name}",
                documentation=ast.get_docstring(node) or "",
                arrangement=self._class_variable(class_name, "combinator"),
                options=tuple(self._options(class_name).values()),
            )
            for class_name, (module, node) in self.classes.items()
            if any(isinstance(found, ast.Name) and found.id == "register_scheme" for found in node.decorator_list)
        ]

    def _fields(self, class_name: str) -> dict[str, ast.AnnAssign]:
        """Class variables and dataclass fields of a class and those above it, in the order of the constructor."""
        if class_name not in self.classes:
            return {}
        fields: dict[str, ast.AnnAssign] = {}
        node = self.classes[class_name][1]
        for base in reversed(node.bases):
            fields |= self._fields(ast.unparse(base))
        is_dataclass = any(ast.unparse(found).startswith("dataclass") for found in node.decorator_list)
        return fields | {
            found.target.id: found
            for found in node.body
            if isinstance(found, ast.AnnAssign) and isinstance(found.target, ast.Name)
            if is_dataclass or _is_class_variable(found)
        }

    def _class_variable(self, class_name: str, name: str) -> Any:
        return self._value(self._fields(class_name)[name].value)

    def _options(self, class_name: str) -> dict[str, Option]:
        options = {}
        for name, field in self._fields(class_name).items():
            if not _is_class_variable(field):
                default = self._value(field.value)
                options[name] = Option(name, ast.unparse(field.annotation), default, _as_typed(default))
        return options

    def _value(self, value: ast.expr | None) -> Any:
        if value is None:
            return REQUIRED
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
            factory = next((word.value for word in value.keywords if word.arg == "default_factory"), None)
            class_name = "" if factory is None else ast.unparse(factory)
            if class_name in self.classes:
                options = self._options(class_name)
                return {"scheme": self._class_variable(class_name, "name")} | {
                    name: option.default for name, option in options.items()
                }
        try:
            return ast.literal_eval(value)
        except ValueError:
            raise NotLiteralError(ast.unparse(value)) from None
