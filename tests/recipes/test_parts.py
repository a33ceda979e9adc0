"""Recipes in one part of a composite model, and in models of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_posenc import UnknownNameError, UnsupportedError, extend_context, patch_model
from hf_posenc.recipes import SchemePhases, begin_blend, drope, finish_blend, set_blend_strength, swap_scheme
from hf_posenc.schemes import AlibiConfig, RopeConfig
from tests.checkpoint.checkpoint_cases import randomize
from tests.patching.composites.models import COMPOSITES
from tests.patching.composites.test_text_part import logits
from tests.patching.vision.models import vit

LLAVA = COMPOSITES["llava"]
SAMPLE = torch.randint(10, 90, (4, 24), generator=torch.Generator().manual_seed(3))


def learned_in_the_vision_part() -> Any:
    model = patch_model(LLAVA.model(), "t5", part="vision")
    randomize(model.position_encoding)
    return model


def test_a_swap_in_the_text_part_keeps_the_base_that_this_part_had() -> None:
    model = patch_model(LLAVA.model(), "rope", theta=500.0)
    swap = swap_scheme(model, "p_rope")
    assert (swap.part, swap.options) == ("text", {"theta": 500.0})
    assert isinstance(swap.old, RopeConfig)
    assert swap.new.name == "p_rope"
    assert model.position_encoding.config.by_part() == {"text": swap.new}


def test_a_bias_of_the_text_part_is_fitted_and_other_parts_keep_what_they_learned() -> None:
    model = learned_in_the_vision_part()
    trained = [parameter.clone() for parameter in model.position_encoding.parameters()]
    swap = swap_scheme(model, "kerple", sample=SAMPLE)
    assert [fit.residual < fit.residual_before for fit in swap.fits] == [True]
    kept = model.position_encoding.stacks["vision_tower"].parameters()
    assert all(torch.equal(before, other) for before, other in zip(kept, trained, strict=True))
    with pytest.raises(ValueError, match="text: pass sample="):
        swap_scheme(model, "t5")


def test_a_gradual_swap_in_one_part_leaves_the_other_part_and_the_outputs() -> None:
    model = learned_in_the_vision_part()
    prompt = LLAVA.prompt()
    before = logits(LLAVA, model, **prompt)
    swap = swap_scheme(model, "t5", gradual=True, sample=SAMPLE)
    assert swap.new.name == "t5"
    assert float((logits(LLAVA, model, **prompt) - before).abs().max()) <= 1e-5
    with pytest.raises(UnsupportedError, match="already a blend"):
        begin_blend(model, "alibi", part="vision")
    set_blend_strength(model, 1.0)
    with_new = logits(LLAVA, model, **prompt)
    assert float((with_new - before).abs().max()) > 1e-3
    finish_blend(model)
    assert [scheme.name for scheme in model.position_encoding.config.by_part().values()] == ["t5", "t5"]
    assert float((logits(LLAVA, model, **prompt) - with_new).abs().max()) <= 1e-5


def test_a_gradual_swap_in_the_vision_part() -> None:
    model = LLAVA.model()
    prompt = LLAVA.prompt()
    before = logits(LLAVA, model, **prompt)
    swap = swap_scheme(model, "alibi", part="vision", gradual=True)
    assert (swap.part, swap.new) == ("vision", AlibiConfig())
    assert float((logits(LLAVA, model, **prompt) - before).abs().max()) <= 1e-5
    set_blend_strength(model, 1.0)
    finish_blend(model)
    assert model.position_encoding.config.by_part() == {"vision": AlibiConfig()}


def test_phases_of_one_part_leave_the_other_part() -> None:
    model = patch_model(LLAVA.model(), "none", part="vision")
    phases = SchemePhases(((0, "rope"), (5, "none"), (8, "native")))
    assert phases.apply(model, 0)
    assert not phases.apply(model, 4)
    assert model.position_encoding.config.by_part()["text"].name == "rope"
    assert phases.apply(model, 5)
    assert phases.apply(model, 8)
    assert list(model.position_encoding.config.by_part()) == ["vision"]
    dropped = drope(10, 0.2, "alibi", part="vision")
    assert dropped.apply(model, 0)
    assert list(model.position_encoding.config.by_part()) == ["vision"]
    assert drope(10, 0.2).apply(vit(), 9)


def test_a_phase_of_mrope_is_placed_once() -> None:
    model = COMPOSITES["qwen2_vl"].model()
    phases = SchemePhases(((0, "mrope"),))
    assert phases.apply(model, 0)
    assert not phases.apply(model, 1)


@pytest.mark.parametrize("make", [vit, LLAVA.model], ids=["vit", "llava"])
def test_a_sample_of_text_is_refused_where_no_text_is_read(make: Callable[[], Any]) -> None:
    model = make()
    with pytest.raises(ValueError, match="does not read token ids"):
        swap_scheme(model, "t5", part="vision", sample=SAMPLE)
    assert not hasattr(model, "position_encoding")
    with pytest.raises(UnsupportedError, match="can be transferred"):
        swap_scheme(model, "t5", part="vision", initialization="fitted")
    with pytest.raises(UnknownNameError, match="audio"):
        swap_scheme(model, "t5", part="audio")


def test_a_context_length_belongs_to_text() -> None:
    model = patch_model(vit(), "none")
    with pytest.raises(UnsupportedError, match="larger images"):
        extend_context(model, length=500)
