"""Parts of models: refused by every verb with a remedy, or patched separately."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_posenc import (
    UnsupportedError,
    inspect_model,
    native_scheme,
    patch_model,
    unpatch_model,
)
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.matrix.running import distance, tokens
from tests.versions import ONE_AXIS, since

VERBS: list[Callable[[Any], Any]] = [
    *(functools.partial(patch_model, scheme=scheme) for scheme in ("native", "none", "rope_nd", "learned")),
    native_scheme,
    inspect_model,
]


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("audio-text-whisper", "encoder", ("is a part of a model and is saved with it", "`part` chooses the part")),
        ("audio-text-whisper", "decoder", ("is a part of a model and is saved with it", "`part` chooses the part")),
        ("seq2seq-bart", "decoder", ("Patch the whole model",)),
    ],
)
def test_a_part_that_is_saved_with_its_model_is_refused_by_every_verb(
    name: str, path: str, words: tuple[str, ...]
) -> None:
    part, said = tiny_model(pair_named(name)).model.get_submodule(path), set()
    for verb in VERBS:
        with pytest.raises(UnsupportedError) as refusal:
            verb(part)
        said.add(str(refusal.value))
    assert len(said) == 1
    assert all(word in text for word in words for text in said)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("image-text-qwen2_5_vl", "model.language_model"),
        ("image-text-llava", "model.language_model"),
        ("image-text-clip", "text_model"),
    ],
)
@torch.no_grad()
def test_the_text_part_of_a_composite_takes_its_native_scheme(name: str, path: str) -> None:
    if "qwen" in name:
        since(*ONE_AXIS)
    part, ids = tiny_model(pair_named(name)).get_submodule(path), tokens(2, 9)
    stock = part(input_ids=ids).last_hidden_state
    assert distance(patch_model(part, "native")(input_ids=ids).last_hidden_state, stock) <= 1e-5
    assert distance(patch_model(part, "none")(input_ids=ids).last_hidden_state, stock) > 1e-2
    assert torch.equal(unpatch_model(part)(input_ids=ids).last_hidden_state, stock)
