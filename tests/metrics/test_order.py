import pytest
import torch

from hf_posenc.metrics import MeasurementError, order_sensitivity
from tests.metrics.conftest import assert_same, fingerprint


@pytest.fixture
def input_ids():
    return torch.randint(4, 80, (8, 12), generator=torch.Generator().manual_seed(1))


def test_figures_agree_with_two_forwards_by_hand_and_the_model_is_left_as_it_was(tiny_llama, input_ids):
    model = tiny_llama().train()
    model.model.layers[0].eval()
    state = fingerprint(model)
    result = order_sensitivity(model, input_ids, swap=(2, 5))
    assert_same(state, fingerprint(model))
    model.eval()
    swapped = input_ids.clone()
    swapped[:, 2], swapped[:, 5] = input_ids[:, 5], input_ids[:, 2]
    with torch.no_grad():
        before, after = (model(ids).logits[:, -1].double() for ids in (input_ids, swapped))
    expected = (after - before).norm(dim=-1) / before.norm(dim=-1)
    assert result.relative_changes == pytest.approx(expected.tolist(), rel=1e-4)
    assert result.mean_relative_change == pytest.approx(expected.mean().item(), rel=1e-4)
    assert result.max_relative_change == pytest.approx(expected.max().item(), rel=1e-4)
    assert result.argmax_changed == (before.argmax(-1) != after.argmax(-1)).double().mean().item()
    assert result.swapped == ((2, 5),) * 8


def test_drawn_pairs_hold_different_tokens_before_the_last_real_one(tiny_bert):
    input_ids = torch.tensor([[5, 5, 5, 6, 5, 9, 0, 0], [7, 8, 9, 10, 11, 12, 13, 14]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8])
    model, state = tiny_bert(), torch.get_rng_state()
    for seed in range(10):
        result = order_sensitivity(model, input_ids, attention_mask=mask, seed=seed)
        for ids, (left, right), last in zip(input_ids, result.swapped, (5, 7), strict=True):
            assert left < right < last
            assert ids[left] != ids[right]
    assert torch.equal(torch.get_rng_state(), state)


def test_right_padding_does_not_change_the_figures(tiny_bert, input_ids):
    padded = torch.nn.functional.pad(input_ids, (0, 4))
    mask = torch.nn.functional.pad(torch.ones_like(input_ids), (0, 4))
    plain, with_padding = (
        order_sensitivity(tiny_bert(), ids, attention_mask=mask, swap=None, seed=3)
        for ids, mask in ((input_ids, torch.ones_like(input_ids)), (padded, mask))
    )
    assert plain.argmax_changed is None  # a bare model has no logits
    assert plain.swapped == with_padding.swapped
    assert plain.relative_changes == pytest.approx(with_padding.relative_changes, rel=1e-3)


@pytest.mark.parametrize(
    ("input_ids", "options", "message"),
    [
        (torch.full((1, 5), 7), {}, "no two different tokens"),
        (torch.tensor([[7]]), {}, "no two different tokens"),
        (torch.tensor([[1, 2, 3]]), {"swap": (1, 2)}, r"two of \[0, 1\]"),
        (torch.tensor([[1, 1, 3]]), {"swap": (0, 1)}, "two equal tokens"),
        (torch.tensor([1, 2, 3]), {}, r"must be \(batch, length\)"),
        (torch.tensor([[1, 2, 3]]), {"attention_mask": torch.ones(1, 2)}, "attention_mask is"),
        (torch.tensor([[1, 2, 3]]), {"attention_mask": torch.zeros(1, 3)}, "no two different tokens"),
    ],
)
def test_input_with_nothing_to_swap_is_refused(tiny_bert, input_ids, options, message):
    with pytest.raises(MeasurementError, match=message):
        order_sensitivity(tiny_bert(), input_ids, **options)
