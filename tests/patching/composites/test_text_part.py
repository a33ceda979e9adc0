"""A scheme in the text part of a model of images and text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import MRopeConfig, native_scheme, patch_model
from tests.matrix.running import drawn
from tests.thinning import in_turn

from .models import COMPOSITES, MULTIMODAL_ROPE, Composite


def logits(composite: Composite, model: Any, **arguments: Any) -> Tensor:
    given = {name: value for name, value in arguments.items() if name != "mm_token_type_ids" or takes_types(model)}
    with torch.no_grad():
        result: Tensor = model(**given).logits
    return result


def takes_types(model: Any) -> bool:
    return "Qwen" in type(model).__name__


def check_decoding(composite: Composite, model: Any) -> None:
    prompt = composite.prompt(images=2)
    given = prompt if takes_types(model) else {key: one for key, one in prompt.items() if key != "mm_token_type_ids"}
    generated = model.generate(
        **given, max_new_tokens=4, min_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    ids = generated.sequences[:, :-1]
    types = torch.nn.functional.pad(prompt["mm_token_type_ids"], (0, 3))
    whole = logits(composite, model, **prompt | {"input_ids": ids, "mm_token_type_ids": types})
    assert float((whole[:, -4:] - torch.stack(generated.logits, 1)).abs().max()) <= 1e-4


@pytest.mark.parametrize("scheme", ["alibi", "t5", "shaw", "fire"])
def test_attention_in_both_directions_in_images_is_the_same_in_every_backend(scheme: str) -> None:
    composite = COMPOSITES["gemma3"]
    model = drawn(patch_model(composite.model(), scheme), std=0.3)
    prompt = composite.prompt(images=2) | {"token_type_ids": composite.prompt(images=2)["mm_token_type_ids"]}
    found = logits(composite, model, **prompt)
    model.set_attn_implementation("eager")
    assert float((logits(composite, model, **prompt) - found).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", MULTIMODAL_ROPE)
def test_mrope_starts_from_the_native_one(name: str) -> None:
    composite = COMPOSITES[name]
    model = composite.model()
    prompt = composite.prompt(images=2)
    stock = logits(composite, model, **prompt)
    native = native_scheme(model)
    assert isinstance(native, MRopeConfig)
    patch_model(model, "mrope")
    assert model.position_encoding.config.by_part() == {"text": native}
    assert torch.equal(logits(composite, model, **prompt), stock)
    check_decoding(composite, model)


@pytest.mark.parametrize(
    "options", [{"interleaved": True}, {"by_head": True, "sections": (0, 1, 1)}, {"spatial_reset": True}]
)
def test_other_assignments_of_mrope_change_images_and_not_text(options: dict[str, Any]) -> None:
    composite = COMPOSITES["qwen2_vl"]
    model = composite.model()
    prompt, words = composite.prompt(), {"input_ids": torch.arange(20, 30).unsqueeze(0)}
    stock, of_words = logits(composite, model, **prompt), logits(composite, model, **words)
    patch_model(model, "mrope", **options)
    assert float((logits(composite, model, **prompt) - stock).abs().max()) > 1e-3
    if not options.get("by_head"):
        assert float((logits(composite, model, **words) - of_words).abs().max()) <= 1e-5
    check_decoding(composite, model)


@pytest.mark.parametrize("name", MULTIMODAL_ROPE)
def test_without_positions_the_coordinates_of_an_image_have_no_effect(name: str) -> None:
    composite = COMPOSITES[name]
    model = patch_model(composite.model(), "none")
    prompt = composite.prompt()
    expected = logits(composite, model, **prompt)
    torch.manual_seed(3)
    others = torch.randint(0, 50, (3, *prompt["input_ids"].shape))
    assert torch.equal(logits(composite, model, **prompt, position_ids=others), expected)
    native = patch_model(model, "native")
    assert float((logits(composite, native, **prompt, position_ids=others) - expected).abs().max()) > 1e-3


@pytest.mark.parametrize(("scheme", "name"), in_turn(["native", "alibi", "sinusoidal"], MULTIMODAL_ROPE))
def test_packed_documents_with_images_are_separate(name: str, scheme: str) -> None:
    composite = COMPOSITES[name]
    model = patch_model(composite.model(), scheme)
    first, second = composite.prompt(seed=1), composite.prompt(before=3, seed=2)
    expected = [logits(composite, model, **one) for one in (first, second)]
    found = logits(
        composite,
        model,
        input_ids=torch.cat((first["input_ids"], second["input_ids"]), 1),
        position_ids=torch.cat([_all_axes(model, one) for one in (first, second)], dim=-1),
        pixel_values=torch.cat((first["pixel_values"], second["pixel_values"])),
        image_grid_thw=torch.cat((first["image_grid_thw"], second["image_grid_thw"])),
        use_cache=False,
    )
    assert float((found - torch.cat(expected, 1)).abs().max()) <= 1e-4


def _all_axes(model: Any, prompt: dict[str, Tensor]) -> Tensor:
    """`(4, 1, length)`: the place in the sequence, time, height and width."""
    types = prompt["mm_token_type_ids"]
    axes, _ = model.model.get_rope_index(prompt["input_ids"], types, image_grid_thw=prompt["image_grid_thw"])
    return torch.cat((torch.arange(types.shape[1]).expand(1, 1, -1), axes))
