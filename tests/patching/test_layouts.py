"""A registered kind of tokens is used wherever the kind matters; no other code depends on the kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Florence2VisionConfig, PreTrainedModel
from transformers.models.florence2.modeling_florence2 import Florence2VisionBackbone

from hf_posenc import UnsupportedError, inspect_model, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.anatomy import anatomy
from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.layouts import Text
from tests.models import tiny

#: Rows and columns of a window.
WINDOW = 4
REASON = "the first step reads no positions"


class Steps(Text):
    """Steps of a model, the first of which keeps its positions."""

    left_alone = (r"^layers\.0\.", REASON)

    @classmethod
    def recognises(cls, module: PreTrainedModel) -> bool:
        return type(module).__name__.startswith("Llama")


def test_another_kind_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomy, "_KINDS", [Steps, *anatomy._KINDS])
    model = tiny("LlamaForCausalLM").eval()
    assert inspect_model(model).stacks[0].left_alone == [f"layers.0.self_attn: {REASON}"]
    assert native_scheme(model).name == "rope"
    (report,) = patch_model(model, "alibi").position_encoding.report.stacks
    assert report.attention_layers == [1]
    assert report.kept == [f"layers.0.self_attn: {REASON}"]
    unpatch_model(model)
    assert type(Anatomy(tiny("BertForMaskedLM")).stacks()[0].layout) is Text


@pytest.fixture
def windowed() -> Florence2VisionBackbone:
    """Florence-2's attention receives a whole image, divides it into windows, and then compares channels."""
    torch.manual_seed(0)
    config = Florence2VisionConfig(
        embed_dim=[16, 32], num_heads=[2, 4], num_groups=[2, 4], depths=[1, 1], patch_size=[7, 3], patch_stride=[4, 2],
        patch_padding=[3, 1], patch_prenorm=[False, True], window_size=WINDOW, projection_dim=32, drop_path_rate=0.0,
    )  # fmt: skip
    return Florence2VisionBackbone(config).eval()


def test_stages_of_a_width_of_their_own_state_it_in_their_modules(windowed: Florence2VisionBackbone) -> None:
    (stack,) = Anatomy(windowed).stacks()
    assert [attention.head_dim for attention in stack.attentions] == [8, 8]
    assert [path.rpartition(".")[2] for path, _ in stack.skipped] == ["channel_attn"] * 2
    del stack.attentions[0].module.dim
    with pytest.raises(UnsupportedError, match="width of its heads"):
        Anatomy(windowed).stacks()


@pytest.mark.parametrize("side", [32, 24], ids=["whole windows", "padded windows"])
@torch.no_grad()
def test_attention_that_divides_an_image_itself_has_the_places_in_its_windows(
    windowed: Florence2VisionBackbone, side: int
) -> None:
    patch_model(windowed, "alibi", axes=2)
    seen: list[tuple[Any, Tensor, Tensor]] = []
    for module in windowed.modules():
        if type(module).__name__ == "Florence2VisionWindowAttention":
            module.register_forward_hook(lambda module, given, output: seen.append((module, given[0], output)))
    windowed(torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0)))
    assert len(seen) == 2
    for module, hidden, output in seen:
        torch.testing.assert_close(output, in_windows(module, hidden), atol=1e-6, rtol=1e-5)


def in_windows(module: Any, hidden: Tensor) -> Tensor:
    """Attention in windows of `(batch, rows, columns, hidden)`, less the distances between patches, written out."""
    _, rows, columns, _ = hidden.shape
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, -columns % WINDOW, 0, -rows % WINDOW))
    places = torch.cartesian_prod(torch.arange(float(WINDOW)), torch.arange(float(WINDOW)))
    slopes = 2.0 ** (-8 * torch.arange(1.0, 1 + module.num_heads) / module.num_heads)
    # A row and a column of windows, and the patches of each.
    windows = padded.unflatten(2, (-1, WINDOW)).unflatten(1, (-1, WINDOW)).transpose(2, 3).flatten(3, 4)
    heads = module.qkv(windows).unflatten(-1, (3, module.num_heads, -1)).transpose(-4, -2)
    query, key, value = heads.unbind(-3)
    logits = query @ key.mT * module.scale - slopes[:, None, None] * torch.cdist(places, places)
    attended = module.proj((logits.softmax(-1) @ value).transpose(-3, -2).flatten(-2))
    result = attended.unflatten(3, (WINDOW, WINDOW)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return result[:, :rows, :columns].flatten(1, 2)
