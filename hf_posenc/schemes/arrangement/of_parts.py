"""Different schemes in different parts of a composite model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.registry import as_scheme, register_scheme
from hf_posenc.schemes.validation import shown


@register_scheme
class PartsConfig(SchemeConfig):
    """One scheme for each named part of a composite model, such as its text and its vision part.

    `patch_model(model, scheme, part=...)` creates it. Parts that it does not name keep their native scheme.

    Args:
        names: the names of the parts, such as ("text", "vision").
        schemes: the scheme of each: configs, names or dictionaries, or lists of these to combine.

    Raises:
        ValueError: if there are no parts, a name occurs twice or is not a string, the two options have different
            lengths, or a scheme is a `PartsConfig` itself.
    """

    name: ClassVar[str] = "parts"
    combinator: ClassVar[bool] = True
    without_parts: ClassVar[str] = (
        "has no parts itself; it defines the scheme of each part of a model. Build those instead (`by_part`)."
    )

    names: tuple[str, ...] = ()
    schemes: tuple[SchemeConfig, ...] = ()

    def __post_init__(self) -> None:
        names, schemes = self.names, self.schemes
        sequences = isinstance(names, tuple | list) and isinstance(schemes, tuple | list)
        if not sequences or not names or len(names) != len(schemes) or len(set(names)) != len(names):
            raise ValueError(
                f"PartsConfig has the names {shown(names)} and the schemes {shown(schemes)}; expected as many schemes "
                "as names, at least one, and every name once: PartsConfig(names=('text',), schemes=(AlibiConfig(),))."
            )
        if not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"PartsConfig.names is {shown(names)}; expected the names of parts, such as 'text'.")
        object.__setattr__(self, "names", tuple(names))
        configs = tuple(as_scheme(scheme, "An entry of PartsConfig.schemes") for scheme in schemes)
        object.__setattr__(self, "schemes", configs)
        if any(isinstance(scheme, PartsConfig) for scheme in self.schemes):
            raise ValueError("A part of a model has one scheme, but PartsConfig.schemes contains a PartsConfig.")

    @property
    def label(self) -> str:
        """The label of each part: `text: alibi; vision: rope_nd`."""
        return "; ".join(f"{part}: {scheme.label}" for part, scheme in self.by_part().items())

    def for_part(self, part: str) -> SchemeConfig | None:
        """The scheme of a part; `None` if it is not named."""
        return self.by_part().get(part)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names."""
        return self.names

    def by_part(self) -> dict[str, SchemeConfig]:
        """The schemes by name of the part."""
        return dict(zip(self.names, self.schemes, strict=True))


def of_parts(schemes: Mapping[str, SchemeConfig]) -> PartsConfig:
    """The config for schemes by name of the part. Equal mappings in any order give equal configs."""
    names = sorted(schemes)
    return PartsConfig(names=tuple(names), schemes=tuple(schemes[name] for name in names))
