import pytest
import torch

from hf_posenc import AlibiConfig, ComposedConfig, RopeConfig, UnsupportedError, list_schemes, patch_model
from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.language_modeling import token_losses
from hf_posenc.metrics.quantization import (
    VARIANTS,
    QuantizedConfig,
    quantization_test,
    quantized_positions,
    rounded,
    rounded_ids,
)
from hf_posenc.schemes import InterleavedConfig, NoneConfig
from hf_posenc.schemes.config import BuildContext
from hf_posenc.schemes.positions import AttentionPairs, Positions
from tests.metrics.conftest import TEXT
from tests.models import tiny

#: Rounding of float32 in the mean of a loss.
ROUNDING = 1e-5


@pytest.fixture
def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 80, "hidden_size": 64, "max_position_embeddings": 8192, "initializer_range": 0.3}
    return tiny("LlamaForCausalLM", **sizes).eval()


@pytest.fixture
def ids():
    return torch.randint(4, 80, (2, 48), generator=torch.Generator().manual_seed(1))


def numbers(model, ids, quantity, **options):
    """One quantity by variant and position."""
    records = quantized_positions(model, ids, ids, **options)
    return {(one.at["held in"], one.at["position"]): one.value for one in records if one.quantity == quantity}


def test_ids_are_rounded_as_a_cast_rounds_them():
    ids = torch.arange(70_000)
    assert rounded_ids(ids, "bfloat16")[:257].equal(ids[:257])
    assert rounded_ids(ids, "bfloat16")[257:260].tolist() == [256, 258, 260]
    assert rounded_ids(ids, "float16")[:2049].equal(ids[:2049])
    assert rounded_ids(ids, "float16")[[2049, 2051, 65_504, 69_999]].tolist() == [2048, 2052, 65_504, 65_504]
    assert rounded_ids(torch.tensor([257.5]), "bfloat16").tolist() == [258.0]


def test_values_are_rounded_to_the_format():
    values = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    assert rounded(values, "bfloat16").equal(values.bfloat16().float())
    assert rounded(torch.tensor([1e9, -1e9]), "float16").tolist() == [65_504.0, -65_504.0]
    for form, steps in (("int8", 127), ("int4", 7)):
        whole = rounded(values, form)
        assert whole.unique().numel() <= 2 * steps + 1
        # Half a step of the one scale, and a little for float32.
        assert (whole - values).abs().max() <= values.abs().max() / steps / 2 * 1.0001
        rows = rounded(values, form, scale_over=(-1,))
        assert ((rows - values).abs() <= values.abs().amax(-1, keepdim=True) / steps / 2 * 1.0001).all()
        assert rounded(torch.zeros(4), form).tolist() == [0.0] * 4
    hidden = torch.tensor([1.0, 0.5, -1e9])
    counted = torch.tensor([True, True, False])
    assert rounded(hidden, "int8", counted=counted).tolist() == pytest.approx([1.0, 64 / 127, -1.0])


@pytest.mark.parametrize("scheme", ["native", "rope", "alibi", "sinusoidal", "t5", "xpos", "cope"])
def test_nothing_rounded_is_the_scheme_itself(llama, ids, scheme):
    if scheme != "native":
        patch_model(llama, scheme)
    if llama_encoding := getattr(llama, "position_encoding", None):
        with torch.no_grad():
            for parameter in llama_encoding.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    expected = float(token_losses(llama, ids, ids, True).nanmean())
    if scheme == "cope":
        with pytest.raises(UnsupportedError, match="order of tokens"):
            quantized_positions(llama, ids, ids, positions=[0], variants=[])
        return
    found = numbers(llama, ids, "loss", positions=[0], variants=[])
    assert found == {("float32", 0): pytest.approx(expected, abs=ROUNDING)}
    if scheme != "native":
        # Put back with all it has learned.
        assert llama.position_encoding.config.name == scheme
        assert float(token_losses(llama, ids, ids, True).nanmean()) == expected


def test_every_variant_changes_a_rotation_and_coarser_ones_change_it_more(llama, ids):
    found = numbers(llama, ids, "change", positions=[1000])
    changes = {variant: abs(change) for (variant, _), change in found.items()}
    assert list(changes) == list(VARIANTS)
    assert all(change > 0 for variant, change in changes.items() if variant != "ids float16")
    assert changes["ids float16"] == 0  # 1048 < 2048
    assert changes["keys int8 after"] != changes["keys int8 before"]
    errors = {}
    for form in ("float16", "bfloat16", "int8", "int4"):
        part = QuantizedConfig(inner=RopeConfig(), encodings=form).build(BuildContext(64, 4, 16)).query_key_map
        exact = RopeConfig().build(BuildContext(64, 4, 16)).query_key_map
        where = Positions(torch.arange(100)[None], torch.tensor([[100]]))
        errors[form] = max(
            float((one - other).abs().max()) for one, other in zip(part.phases(where), exact.phases(where), strict=True)
        )
    assert 0 < errors["float16"] < errors["bfloat16"] < errors["int8"] < errors["int4"]


def test_keys_are_rounded_before_or_after_their_rotation():
    context = BuildContext(64, 4, 16)
    key = torch.randn(1, 4, 10, 16, generator=torch.Generator().manual_seed(0))
    where = Positions(torch.arange(10)[None], torch.tensor([[10]]))
    rope = RopeConfig().build(context).query_key_map
    phases = rope.phases(where)
    before = QuantizedConfig(inner=RopeConfig(), keys="int8", keys_before=True).build(context).query_key_map
    after = QuantizedConfig(inner=RopeConfig(), keys="int8").build(context).query_key_map
    assert before.map_key(key, before.phases(where)).equal(rope.map_key(rounded(key, "int8", scale_over=(-1,)), phases))
    assert after.map_key(key, after.phases(where)).equal(rounded(rope.map_key(key, phases), "int8", scale_over=(-1,)))
    assert before.map_query(key, phases).equal(rope.map_query(key, phases))


def test_the_integer_scale_of_a_bias_is_that_of_what_can_be_seen():
    context = BuildContext(64, 4, 16, causal=True)
    bias = QuantizedConfig(inner=AlibiConfig(), encodings="int8").build(context).logit_bias
    exact = QuantizedConfig(inner=AlibiConfig()).build(context).logit_bias
    heads = torch.zeros(1, 4, 64, 16)
    pairs = AttentionPairs(heads, heads, torch.arange(64), Positions(torch.arange(64)[None], torch.tensor([[64]])), 1.0)
    visible = torch.ones(64, 64).tril().bool()
    error = (bias(pairs) - exact(pairs)).abs()[..., visible].amax(-1)[0]
    steps = exact(pairs).abs()[..., visible].amax(-1)[0] / 127
    assert (error > 0).all()
    assert (error <= steps / 2 * 1.0001).all()


def test_schemes_that_differ_between_layers_are_rounded_layer_by_layer(llama, ids):
    patch_model(llama, InterleavedConfig(every=2))
    options = {"positions": [4096], "variants": ["ids bfloat16"]}
    assert abs(numbers(llama, ids, "change", **options)["ids bfloat16", 4096]) > 1e-3
    patch_model(llama, ComposedConfig(parts=(RopeConfig(), AlibiConfig())))
    assert abs(numbers(llama, ids, "change", **options)["ids bfloat16", 4096]) > 1e-3
    patch_model(llama, InterleavedConfig(inner=NoneConfig(), every=2))
    with pytest.raises(UnsupportedError, match="nothing to round"):
        quantized_positions(llama, ids, ids)


def test_the_rounded_scheme_is_nobody_elses(llama):
    assert "quantized" not in list_schemes()
    for options in ({"ids": "int8"}, {"encodings": "int3"}, {"keys": "float16"}, {"offset": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            QuantizedConfig(**options)


def test_what_has_no_keys_to_round_or_no_positions_left_says_so(llama, word_tokenizer):
    result = quantization_test(
        llama, word_tokenizer, TEXT, ["native", "alibi", "learned", "none"], length=32, positions=[0, 9000],
        variants=["ids bfloat16", "keys int8 after"],
    )  # fmt: skip
    assert all(record.value is not None for record in result.of("native", "loss"))
    keys = [
        result.record("alibi", "loss", position=position, **{"held in": "keys int8 after"}) for position in (0, 9000)
    ]
    assert [record.value for record in keys] == [None, None]
    assert "does not map keys" in keys[0].note
    in_float32 = {record.at["position"]: record for record in result.of("learned", "loss", **{"held in": "float32"})}
    assert in_float32[0].value is not None
    assert "8192 positions" in in_float32[9000].note
    assert "encodes no positions" in result.subject("none").error
    assert "change at 9000" in result.table(markdown=True)
    assert result.value("native", "change", position=0, **{"held in": "ids bfloat16"}) == 0
    assert "position_encoding" not in dict(llama.named_modules())


def test_impossible_measurements_are_refused(llama, ids):
    for options in ({"variants": ["ids int3"]}, {"positions": []}, {"positions": [-1]}):
        with pytest.raises(MeasurementError, match="positions must be 0 or more"):
            quantized_positions(llama, ids, ids, **options)
