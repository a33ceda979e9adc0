"""All kinds of files that are damaged."""

from __future__ import annotations

from tests.hostile.checkpoint_kinds import ConfigBytes, ConfigEntry, WeightsHeader, WeightsIndex
from tests.hostile.kinds import FileKind
from tests.hostile.settings_kinds import MinimalPairs, Study

KINDS: dict[str, type[FileKind]] = {
    "config": ConfigEntry,
    "config-bytes": ConfigBytes,
    "weights": WeightsHeader,
    "index": WeightsIndex,
    "study": Study,
    "minimal-pairs": MinimalPairs,
}
