"""Fitted initialization: what is fitted, how well, and what is refused."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DebertaV2Config, DebertaV2Model

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.place.encoding import current_encoding
from hf_posenc.recipes import finish_blend, set_blend_strength, swap_scheme
from hf_posenc.recipes.initialization.logits import mean_logits, recorded_heads
from hf_posenc.recipes.initialization.parts import TABLE_EXTENSIONS, extended_rows, fit_bias
from hf_posenc.schemes import (
    AlibiConfig,
    KerpleConfig,
    LearnedConfig,
    LinearScaling,
    RopeConfig,
    SchemeParts,
    SinusoidalConfig,
    T5Config,
)
from hf_posenc.schemes.parts import LogitBias
from tests.matrix.running import distance, outputs, patched, tokens
from tests.models import tiny
from tests.thinning import in_turn

SAMPLE_LENGTH = 24


def _sample() -> Tensor:
    return tokens(batch=4, length=SAMPLE_LENGTH, seed=5)


def _layer(model: Any, index: int = 0) -> Any:
    (stack,) = model.position_encoding.stacks.values()
    return stack.layers[index]


def _additive(model: Any) -> Any:
    (stack,) = model.position_encoding.stacks.values()
    return stack.additive


@torch.no_grad()
def _outputs(model: Any) -> Tensor:
    return outputs(model, tokens())


# Tables


@pytest.mark.parametrize(
    ("architecture", "old", "new"),
    [
        ("llama_gqa", SinusoidalConfig(scale=0.5), LearnedConfig(num_positions=64)),
        ("llama_gqa", "rope", ["rope", LearnedConfig(num_positions=32)]),
        # Next to a formula, it holds the difference.
        ("bert", None, [LearnedConfig(), "sinusoidal"]),
    ],
    ids=["formula", "nothing", "beside a formula"],
)
def test_a_table_takes_over_what_was_added(architecture, old, new):
    model = patched(architecture, old).eval()
    before = _outputs(model)
    (fit,) = swap_scheme(model, new, initialization="fitted").fits
    assert distance(_outputs(model), before) < 1e-5
    added = old != "rope"
    assert (fit.residual, fit.residual_before is None) == (pytest.approx(0, abs=1e-6) if added else None, not added)
    # The default start is small noise and misses all of a formula.
    assert fit.residual_before is None or fit.residual_before > 0.9
    assert added or not _additive(model).weight.any()


@pytest.mark.parametrize("extension", TABLE_EXTENSIONS)
def test_a_longer_table_is_extended_from_the_native_one(extension):
    model = patched("bert", None)
    native = model.base_model.embeddings.position_embeddings.weight.detach().clone()
    positions = native.shape[0]
    swap = swap_scheme(model, "learned", num_positions=4 * positions, table_extension=extension)
    assert torch.equal(_additive(model).weight, extended_rows(native, 4 * positions, extension))
    assert swap.fits[0].covers == positions
    outputs(model, tokens(length=2 * positions))


@pytest.mark.parametrize(
    ("family", "scheme", "said"),
    [
        ("bert", LearnedConfig(num_positions=256), r"192 of the 256 rows.*own table has 64 rows\. .*swap_scheme"),
        ("bert", LearnedConfig(num_positions=256, extension="interpolate"), None),
        ("bert", LearnedConfig(num_positions=32), None),
        ("bert", "t5", None),
        ("t5", T5Config(num_buckets=64), r"64 of the 64 rows.*has 32 rows, which do not fit\. .*'native'"),
        ("t5", T5Config(), None),
        ("t5", "kerple", None),
    ],
)
def test_rows_that_stay_random_beside_a_native_table_are_said(family, scheme, said):
    kinds = {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration"}
    with warnings.catch_warnings(record=True, action="always") as caught:
        model = patch_model(tiny(kinds[family]), scheme)
        patch_model(model, scheme)  # the current scheme stays, and no warning is repeated
    found = [str(warning.message) for warning in caught if "at random" in str(warning.message)]
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


def test_rows_between_rows():
    rows = torch.tensor([[0.0, 0.0], [1.0, 4.0], [4.0, 0.0]])
    assert torch.equal(extended_rows(rows, 5, "linear")[:, 0], torch.tensor([0.0, 0.5, 1.0, 2.5, 4.0]))
    assert torch.equal(extended_rows(rows, 5, "repeat")[:, 0], torch.tensor([0.0, 1.0, 4.0, 0.0, 1.0]))
    assert torch.equal(extended_rows(rows, 5, "last")[:, 0], torch.tensor([0.0, 1.0, 4.0, 4.0, 4.0]))
    for extension in set(TABLE_EXTENSIONS) - {"long_clip"}:
        assert torch.allclose(extended_rows(rows, 3, extension), rows)
    with pytest.raises(ValueError, match="keeps the first 20 rows and stretches the others, but the table has only 3"):
        extended_rows(rows, 5, "long_clip")
    # A natural spline through three points with unit steps: m = 6 (y0 - 2 y1 + y2) / 4 in the middle, 0 at the ends;
    # half-way its value is the mean of the ends less m / 16.
    m = 6 * (0 - 2 * 4 + 0) / 4
    assert torch.allclose(extended_rows(rows, 5, "spline")[1, 1], torch.tensor(2.0 - m / 16))


def test_rows_as_in_long_clip():
    """77 rows become 248: 20 that stay, four for each of the others, the last three along the last difference."""
    rows = torch.randn(77, 8)
    expected = [*rows[:20]]
    for row, following in zip(rows[20:], [*rows[21:], 2 * rows[76] - rows[75]], strict=True):
        expected += [row + (following - row) * quarter / 4 for quarter in range(4)]
    assert torch.allclose(extended_rows(rows, 248, "long_clip"), torch.stack(expected), atol=1e-6)


# Biases


def test_a_fitted_bias_takes_the_place_of_one_in_scaled_keys():
    """DeBERTa-v2 multiplies keys with the factor of its logits. With equal queries, its bias depends on distance."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    options = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p"], "vocab_size": 96}
    model = DebertaV2Model(DebertaV2Config(**sizes, **options, max_position_embeddings=64)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        if "query_proj" in name:
            torch.nn.init.normal_(parameter, std=float(name.endswith("bias")))
    sample = torch.randint(3, 90, (8, 32))
    with torch.no_grad():
        before = model(sample).last_hidden_state
        swap_scheme(model, "t5", initialization="fitted", sample=sample, num_buckets=128, max_distance=200)
        # One bucket per distance; what is left is rounding in a least-squares fit.
        assert (model(sample).last_hidden_state - before).abs().max() < 1e-3
        patch_model(model, "none")
        assert (model(sample).last_hidden_state - before).abs().max() > 0.02


def test_recording_leaves_the_model_as_it_was():
    ids = tokens()
    model = patched("llama_gqa", ["rope", "t5"]).train()
    with torch.no_grad():
        before = outputs(model, ids)
        recorded_heads(Anatomy(model), current_encoding(model), _sample())
        assert torch.equal(outputs(model, ids), before)
    assert model.training


@pytest.mark.parametrize(
    ("old", "new", "tolerance"),
    [
        # 32 buckets hold the 24 distances of the sample one by one up to 16 and in pairs beyond, so ALiBi is nearly in
        # reach; a power of distance, and slopes that are learned, have ALiBi among them.
        (AlibiConfig(), T5Config(), 0.05),
        (AlibiConfig(), AlibiConfig(learnable=True), 1e-3),
        (AlibiConfig(), KerpleConfig(variant="power", minimum=1e-3), 0.01),
        (T5Config(), T5Config(), 1e-3),
    ],
    ids=["alibi-t5", "alibi-learnable", "alibi-power", "t5-t5"],
)
def test_a_bias_takes_over_a_bias(old, new, tolerance):
    model = patched("llama_gqa", old).eval()
    with torch.no_grad():
        distances = torch.arange(1 - SAMPLE_LENGTH, 1)
        wanted = _layer(model).logit_bias(distances)
        before = _outputs(model)
    torch.manual_seed(3)
    swap = swap_scheme(model, new, sample=_sample(), initialization="fitted")
    (fit,) = swap.fits
    assert fit.where == "logit_bias of layers 0-1"
    assert fit.residual < tolerance
    with torch.no_grad():
        bias = _layer(model).logit_bias(distances)
        missed = (bias - bias.mean(-1, keepdim=True)) - (wanted - wanted.mean(-1, keepdim=True))
    assert float(missed.abs().max()) < 10 * tolerance * float(wanted.abs().max())
    assert distance(_outputs(model), before) < 20 * tolerance


class Steep(LogitBias):
    """Its bias is no number for a weight of 1 and more, next to the solution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 1))

    def forward(self, distances: Tensor) -> Tensor:
        return -torch.log1p(-self.weight) * distances.abs()


@pytest.mark.parametrize("slope", [-8.0, 8.0])
def test_a_fit_that_steps_over_a_cliff_keeps_its_best_parameters(slope):
    """Slopes of 8 need weights of 0.9997 or -2980; the first steps go far past 1."""
    part, distances = Steep(), torch.arange(-63.0, 1.0)
    fit = fit_bias(part, [slope * distances.abs().expand(2, -1)], 64, "a test")
    assert part.weight.isfinite().all()
    assert math.isfinite(fit.residual)
    assert fit.residual < fit.residual_before


@pytest.mark.parametrize(
    ("new", "architecture"),
    in_turn(["t5", "kerple", "fire", AlibiConfig(learnable=True)], ["llama_gqa", "bert"]),
    ids=str,
)
def test_a_fit_is_nearer_to_the_old_scheme_than_the_default(architecture, new):
    torch.manual_seed(3)
    swap = swap_scheme(patched(architecture, None), new, sample=_sample())
    assert swap.fits
    assert all(fit.residual < fit.residual_before for fit in swap.fits)


def test_the_target_is_what_the_new_logits_lack():
    """With a bucket for every distance the mean logits after the swap are those before, up to a constant per head."""
    model = patched("llama_gqa", None).eval()
    patch_model(model, "rope", theta=model.config.rope_parameters["rope_theta"])
    old = current_encoding(model)
    heads = recorded_heads(Anatomy(model), old, _sample())
    wanted = [
        mean_logits(SchemeParts(query_key_map=_layer(model, i).query_key_map), heads[i], causal=True) for i in range(2)
    ]
    swap_scheme(model, T5Config(num_buckets=64, max_distance=64, shared=False), sample=_sample())
    for index in range(2):
        parts = SchemeParts(logit_bias=_layer(model, index).logit_bias)
        means = mean_logits(parts, heads[index], causal=True)
        difference = means - wanted[index]
        # Far distances have few pairs, and so little weight against the fit's price for leaving the start.
        assert float(difference.detach().std(-1).max()) < 0.01 * float(wanted[index].std(-1).max())


# Scales, options, blends


def test_a_learned_scale_starts_at_one_on_average():
    model = patched("llama_gqa", None)
    swap = swap_scheme(model, ["rope", "ssmax"], sample=_sample())
    assert {fit.where for fit in swap.fits} == {"logit_scale of layer 0", "logit_scale of layer 1"}
    assert all(fit.residual < fit.residual_before for fit in swap.fits)


def test_the_base_of_the_old_rotation_is_kept():
    model = patched("llama_gqa", RopeConfig(theta=777.0))
    swap = swap_scheme(model, "p_rope", fraction=0.5, initialization="fitted")
    assert swap.options == {"theta": 777.0}
    assert swap.new.theta == 777.0
    given = swap_scheme(patched("llama_gqa", RopeConfig(theta=777.0)), "p_rope", theta=9.0)
    assert (given.new.theta, given.options) == (9.0, {})
    for scheme, theta in (("p_rope:theta=9", 9.0), ("p_rope:fraction=0.5", 777.0)):
        assert swap_scheme(patched("llama_gqa", RopeConfig(theta=777.0)), scheme).new.theta == theta
    default = swap_scheme(patched("llama_gqa", RopeConfig(theta=777.0)), "p_rope", initialization="default")
    assert default.new.theta == 10000.0
    scaled = patched("llama_gqa", RopeConfig(theta=500.0, scaling=LinearScaling(2.0)))
    assert swap_scheme(scaled, "rope").new == RopeConfig(theta=500.0)


@pytest.mark.parametrize("new", [T5Config(), LearnedConfig(num_positions=32)], ids=str)
def test_the_end_of_a_blend_is_fitted(new):
    model, plain = patched("bert", None).eval(), patched("bert", None).eval()
    torch.manual_seed(3)
    swap_scheme(plain, new, sample=_sample())
    torch.manual_seed(3)
    before = _outputs(model)
    swap = swap_scheme(model, new, sample=_sample(), gradual=True)
    assert swap.gradual
    assert distance(_outputs(model), before) < 1e-6
    set_blend_strength(model, 1.0)
    finish_blend(model)
    # The same least squares from the same start, in the same order of operations.
    assert distance(_outputs(model), _outputs(plain)) < 1e-4


def test_places_are_those_of_patch_model():
    places = {"layers": [0], "elsewhere": "none", "cross_attention": "alibi"}
    model, plain = patched("bart", None).eval(), patched("bart", None)
    swap = swap_scheme(model, "t5", sample=_sample(), **places)
    assert {fit.where for fit in swap.fits} == {"logit_bias of layer 0", "logit_bias of layer 2"}  # of the decoder
    assert model.position_encoding.config == patch_model(plain, "t5", **places).position_encoding.config
    for wrong, message in (
        ({"elsewhere": "t5"}, "Pass `layers`"),
        ({"layers": [0], "gradual": True}, "ScheduleConfig"),
    ):
        with pytest.raises(ValueError, match=message):
            swap_scheme(model, "t5", **wrong)


# Refusals


#: The scheme before, the new one, options of the swap, and the refusal.
REFUSED: list[tuple[Any, str, dict[str, Any], type[Exception], str]] = [
    (None, "alibi", {"initialization": "fitted"}, UnsupportedError, "option learnable"),
    (None, "none", {"initialization": "fitted"}, UnsupportedError, "Nothing of the old scheme"),
    ("none", "t5", {"initialization": "fitted"}, UnsupportedError, "Nothing of the old scheme"),
    (None, "shaw", {"initialization": "fitted"}, UnsupportedError, "Nothing of the old scheme"),
    (None, "t5", {}, ValueError, "sample=tokenizer"),
    (None, "t5", {"sample": torch.zeros(2, 8, dtype=torch.long)}, ValueError, "at least 16"),
    (None, "t5", {"sample": torch.zeros(2, 32)}, ValueError, "token ids"),
    (None, "t5", {"sample": torch.zeros(0, 32, dtype=torch.long)}, ValueError, r"shape \(0, 32\)"),
    (None, "t5", {"sample": [[5] * 32]}, ValueError, "sample is a list; expected a tensor"),
    (None, "kerple", {"sample": torch.full((1, 32), 5000)}, ValueError, "from 5000 to 5000, and this .* own tokenizer"),
    (None, "t5", {"initialization": "best"}, ValueError, "initialization is 'best'"),
    (None, "learned", {"num_positions": 99, "table_extension": "cubic"}, ValueError, "table_extension is 'cubic'"),
    (None, "learned", {"num_positions": 9, "table_extension": "last"}, ValueError, "There are no such rows"),
    (None, "alibi", {"table_extension": "last"}, ValueError, "There are no such rows"),
    (
        None,
        "learned",
        {"initialization": "default", "table_extension": "last"},
        ValueError,
        "does not fit anything",
    ),
    ("t5", "alibbi", {}, ValueError, "alibi"),
]


@pytest.mark.parametrize(("refused", "gradual"), in_turn(REFUSED, [False, True]))
def test_a_refused_swap_changes_nothing(refused, gradual):
    old, scheme, options, error, message = refused
    ids = tokens()
    model = patched("llama_gqa", old).eval()
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    with torch.no_grad():
        before = outputs(model, ids)
        with pytest.raises(error, match=message):
            swap_scheme(model, scheme, gradual=gradual, **options)
        assert torch.equal(outputs(model, ids), before)
    encoding = current_encoding(model)
    assert (encoding is None) == (old is None)
    assert encoding is None or encoding.config == T5Config() or old == "none"
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen
