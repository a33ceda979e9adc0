"""The levels at which position encodings are measured: their models, the sizes, and their titles in tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Pixels along each side of a patch.
PATCH = 16


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model. Without `num_key_value_heads`, keys and values have `num_heads` heads."""

    hidden_size: int = 512
    num_layers: int = 6
    num_heads: int = 8
    intermediate_size: int = 1376
    vocab_size: int = 256
    num_key_value_heads: int | None = None


#: The shape in the config of HuggingFaceTB/SmolLM2-135M.
SMOLLM2 = Sizes(576, 30, 9, 1536, 49152, 3)


@dataclass(frozen=True)
class Level:
    """A level. The kind "attention" is one attention call without projections, and the lengths of a "vit" are numbers
    of patches. Without `sizes` it has those of the run, and without `usual` all schemes are measured.
    """

    title: str
    kind: str
    sizes: Sizes | None = None
    usual: tuple[str, ...] | None = None
    to_stock: bool = False


_OF_IMAGES = (
    "none", "learned", "sinusoidal:axes=2", "rope_nd", "rope_nd:assignment=mixed", "alibi:axes=2", "t5:axes=2",
    "swin", "rope", "alibi",
)  # fmt: skip
SMOLLM2_LEVEL, NARROW_LEVEL = "smollm2", "narrow"
#: In the order of tables.
LEVELS = {
    "attention": Level("One attention call", "attention"),
    "model": Level("A small Llama", "llama"),
    SMOLLM2_LEVEL: Level(
        "The shape of SmolLM2-135M", "llama", SMOLLM2,
        usual=("none", "rope", "alibi", "t5", "forget_gate", "self_extend"), to_stock=True,
    ),
    # So narrow that launching its kernels takes longer than running them.
    NARROW_LEVEL: Level("A Llama of 16 layers that are 64 wide", "llama", Sizes(64, 16, 4, 128), to_stock=True),
    "encoder": Level(
        "A small BERT", "bert",
        usual=("none", "learned", "sinusoidal", "rope", "alibi", "t5", "kerple", "sandwich", "shaw"),
    ),
    "vit": Level("A small ViT, T patches of one image", "vit", usual=_OF_IMAGES),
    # The shape in the config of google/vit-base-patch16-224. It has no vocabulary.
    "vit_base": Level(
        "The shape of ViT-B/16, T patches of one image", "vit", Sizes(768, 12, 12, 3072), usual=_OF_IMAGES
    ),
}  # fmt: skip
#: Other levels are measured on request.
DEFAULT_LEVELS = ("attention", "model", "encoder")
#: Levels of models with a cache.
DECODERS = tuple(name for name, level in LEVELS.items() if level.kind == "llama")


def has_smollm2_shape(settings: Mapping[str, Any]) -> bool:
    """Whether the level "smollm2" of a run has that shape, and not a smaller one for testing."""
    return settings.get(SMOLLM2_LEVEL, dataclasses.asdict(SMOLLM2)) == dataclasses.asdict(SMOLLM2)


def image_side(length: int) -> int:
    """Returns the pixels along each side of a square image with this number of patches."""
    side = math.isqrt(length)
    if side**2 != length:
        raise ValueError(
            f"{length} patches are not a square image. Use squares: 196 for 224 pixels in patches of {PATCH}, 576 for "
            "384, 1024 for 512."
        )
    return side * PATCH
