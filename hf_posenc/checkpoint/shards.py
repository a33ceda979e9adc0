"""Which shards were saved together.

One shard of several names the scheme. So that the others cannot be those of another model, the index holds a digest of
each shard. It is added to the index that transformers has written; other programs ignore it. An index without digests,
of a stock tool or of an older version, is accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

#: The key of the digests in the metadata of an index, `{"hf_posenc_shards": {file: digest}}`.
SHARDS = "hf_posenc_shards"
#: Number of bytes that are read at each of a few places of a tensor.
_SAMPLE, _PLACES = 64, 4


def record_shards(folder: Path) -> None:
    """Adds the digests of the shards to every index of safetensors in a folder."""
    for path in folder.glob("*.safetensors.index*.json"):
        index = json.loads(path.read_text(encoding="utf-8"))
        digests = {shard: digest(folder / shard) for shard in set(index["weight_map"].values())}
        index["metadata"][SHARDS] = digests
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def digest(path: Path) -> str:
    """A digest of the header of a safetensors file, and of some bytes of each tensor."""
    content = hashlib.sha256()
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, os.fstat(file.fileno()).st_size))
        content.update(header)
        places = (entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__")
        for start, end in sorted(places):
            for number in range(_PLACES):
                file.seek(8 + len(header) + start + max(end - start - _SAMPLE, 0) * number // (_PLACES - 1))
                content.update(file.read(min(_SAMPLE, end - start)))
    return content.hexdigest()
