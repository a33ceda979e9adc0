"""Plain stock checkpoints: correct in a process without hf_posenc, or refused with the difference."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_posenc
from hf_posenc import (
    ClippedScaling,
    DynamicScaling,
    DynamicYarnScaling,
    InterleavedConfig,
    LearnedConfig,
    LearnedRopeConfig,
    LinearScaling,
    LocalGlobalConfig,
    NativeConfig,
    PRopeConfig,
    RopeConfig,
    ScheduleConfig,
    SchemeConfig,
    StringConfig,
    T5Config,
    UnsupportedError,
    YarnScaling,
)
from hf_posenc.export.carriers import Carrier, proposal
from hf_posenc.export.layers import ModelParts
from hf_posenc.export.stock import target
from hf_posenc.export.stock.own_class import own_class
from hf_posenc.export.targets import find_target
from tests.checkpoint.checkpoint_cases import (
    VOCABULARY,
    bert,
    gpt2,
    llama,
    outputs,
    randomize,
    results_of,
    roberta,
    t5,
    write_reference,
)
from tests.models import tiny

YARN = RopeConfig(scaling=YarnScaling(factor=4.0, original_max_positions=16))

pytestmark = pytest.mark.filterwarnings("ignore:Scheme .* encodes a token differently:UserWarning")


opt = partial(tiny, "OPTForCausalLM", vocab_size=VOCABULARY, max_position_embeddings=48)
bart = partial(tiny, "BartForConditionalGeneration", vocab_size=VOCABULARY, max_position_embeddings=48)
bloom = partial(tiny, "BloomForCausalLM", vocab_size=VOCABULARY)
one_type_bert = partial(bert, type_vocab_size=1)
long_llama = partial(llama, max_position_embeddings=8192)


def gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    return tiny(
        "Gemma3ForCausalLM", vocab_size=VOCABULARY, num_hidden_layers=3, head_dim=8, sliding_window=8,
        layer_types=layers, max_position_embeddings=128,
    )  # fmt: skip


def deepseek() -> PreTrainedModel:
    # The config's head_dim is the 8 dimensions that are rotated, of the 24 of a head.
    return tiny(
        "DeepseekV3ForCausalLM", vocab_size=VOCABULARY, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip


def phi3() -> PreTrainedModel:
    # Its config accepts no rope_type but "default" and "longrope".
    return tiny(
        "Phi3ForCausalLM", vocab_size=VOCABULARY, num_key_value_heads=4, original_max_position_embeddings=64,
        pad_token_id=0,
    )  # fmt: skip


def ministral() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
    rope["original_max_position_embeddings"] = 4096
    return tiny("Ministral3ForCausalLM", vocab_size=VOCABULARY, head_dim=8, rope_parameters=rope)


def native(model: PreTrainedModel) -> SchemeConfig:
    return hf_posenc.native_scheme(model)


#: One of each carrier, and what acts in it. `test_runtimes` exports every scheme, and schemes/test_stock.py compares
#: what is written of every scaling.
EXPRESSIBLE: dict[str, tuple[Callable[[], PreTrainedModel], Any]] = {
    "llama-theta": (llama, RopeConfig(theta=500.0)),
    "llama-yarn": (llama, YARN),
    "llama-clipped": (llama, RopeConfig(scaling=ClippedScaling(3))),
    "llama-clipped_yarn": (llama, RopeConfig(scaling=ClippedScaling(3, scaling=YARN.scaling))),
    "llama-p_rope": (llama, PRopeConfig(fraction=0.5)),
    "gemma3-theta": (gemma3, RopeConfig(theta=700.0)),
    "gemma3-native": (gemma3, native),
    "deepseek-linear": (deepseek, NativeConfig(scaling=LinearScaling(factor=4.0))),
    "deepseek-yarn": (deepseek, NativeConfig(scaling=YarnScaling(factor=4.0, original_max_positions=16))),
    "deepseek-none": (deepseek, "none"),
    "phi3-linear": (phi3, NativeConfig(scaling=LinearScaling(factor=4.0))),
    "phi3-yarn": (phi3, NativeConfig(scaling=YarnScaling(factor=4.0, original_max_positions=16))),
    "gpt2-longer": (gpt2, LearnedConfig(num_positions=80)),
    "gpt2-shorter": (gpt2, LearnedConfig(num_positions=20)),
    "bert-longer": (bert, LearnedConfig(num_positions=64)),
    "roberta-longer": (roberta, LearnedConfig(num_positions=64)),
    "roberta-offset": (roberta, LearnedConfig(num_positions=64, offset=2)),
    "opt-longer": (opt, LearnedConfig(num_positions=64)),
    "bart-longer": (bart, LearnedConfig(num_positions=64)),
    "bert-native": (bert, native),
    "opt-native": (opt, native),
    "t5-own": (t5, "t5"),
    "bloom-native": (bloom, native),
    "llama-none": (llama, "none"),
    "llama-interleaved_pairs": (llama, RopeConfig(layout="interleaved")),
    "llama-half_reversed": (llama, RopeConfig(layout="half_reversed")),
    "llama-spectrum": (llama, RopeConfig(inverse_frequencies=(1.0, 0.5, 0.2, 0.0))),
    "llama-attention_scaling": (llama, RopeConfig(attention_scaling=1.3)),
    "llama-string": (llama, StringConfig(learned_frequencies=False)),
    "bert-string": (bert, StringConfig(learned_frequencies=False, per_head=False)),
    "gpt2-string": (gpt2, StringConfig(learned_frequencies=False, layout="interleaved")),
    "llama-position_scale": (llama, {"scheme": "position_scale", "factor": 0.3}),
    "llama-position_shift": (llama, {"scheme": "position_shift", "inner": "rope", "offset": 7}),
    "llama-no_rope_layers": (llama, InterleavedConfig(every=2)),
    "llama-no_rope_layers_yarn": (llama, InterleavedConfig(inner=YARN, every=2)),
    "gemma3-no_rope_layers": (gemma3, LocalGlobalConfig()),
    "gpt2-rope": (gpt2, "rope"),
    "gpt2-interleaved_pairs": (gpt2, RopeConfig(layout="interleaved")),
    "gpt2-yarn": (gpt2, YARN),
    "opt-sinusoidal": (opt, "sinusoidal"),
    "roberta-sinusoidal": (roberta, "sinusoidal"),
    "bert-rope": (bert, "rope"),
    "bert-t5": (one_type_bert, "t5"),
}


@pytest.mark.parametrize("scheme", [PRopeConfig(fraction=0.5), RopeConfig(attention_scaling=1.3)], ids=str)
def test_vllm_finds_the_attention_factor_at_any_length(scheme: SchemeConfig, tmp_path: Path) -> None:
    model = hf_posenc.patch_model(llama(), scheme)
    hf_posenc.extend_context(model, length=4 * model.config.max_position_embeddings)
    report = hf_posenc.export_model(model, tmp_path / "stock")
    assert report.serving == ("vllm serve {folder}", "transformers serve {folder}")
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    found = config["rope_parameters"]
    # vLLM's Phi3LongRoPEScaledRotaryEmbedding does not read `attention_factor`.
    ratio = config["max_position_embeddings"] / found["original_max_position_embeddings"]
    computed = (
        1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(found["original_max_position_embeddings"]))
    )
    assert found.get("short_mscale", computed) == found.get("long_mscale", computed) == found["attention_factor"]


PART = RopeConfig(rotary_dim=4, scaling=LinearScaling(factor=4.0))
CLAMP = {"scheme": "position_clamp", "maximum": 60}
DYNAMIC = RopeConfig(scaling=DynamicYarnScaling(16))
CLIPPED = RopeConfig(scaling=ClippedScaling(3, scaling=DYNAMIC.scaling))
#: What is refused, and a part of the reason that the error gives.
INEXPRESSIBLE: dict[str, tuple[Callable[[], PreTrainedModel], Any, str]] = {
    "llama-alibi": (llama, "alibi", "no such logit bias"),
    "llama-learned": (llama, "learned", "0 position tables"),
    "llama-dynamic_yarn": (llama, DYNAMIC, "no type for the scaling 'dynamic_yarn'"),
    "llama-dynamic_yarn_as_factors": (llama, DYNAMIC, "depend on the length of the sequence"),
    "llama-clipped_dynamic_yarn": (llama, CLIPPED, "no type for the scaling 'clipped'"),
    "llama-xpos": (llama, "xpos", "more than a rotation"),
    "llama-ssmax": (llama, ["rope", "ssmax"], "no such logit scale"),
    "llama-generator_per_head": (llama, StringConfig("circulant"), "differ between heads"),
    "llama-generator_per_layer": (llama, StringConfig("circulant", per_head=False), "one rotation for all"),
    "llama-two_bases": (llama, ScheduleConfig((RopeConfig(theta=50.0), RopeConfig())), "one rotation for all"),
    "llama-frequencies_per_head": (llama, LearnedRopeConfig(sharing="head"), "differ between heads"),
    "gpt2-interpolate": (gpt2, LearnedConfig(extension="interpolate"), "extension='interpolate'"),
    "roberta-rope": (roberta, "rope", "no such map here"),
    "bert-normalized_integer": (bert, "normalized_integer", "depend on the length"),
    "bert-t5_and_token_types": (bert, "t5", "the second text of a pair"),
    "bert-other_buckets": (bert, T5Config(max_distance=64), "up to a distance of 128"),
    "bert-bias_per_layer": (bert, T5Config(shared=False), "which all layers share"),
    "llama-part_of_a_head": (llama, PART, "a stock LlamaForCausalLM .* cannot run"),
    # The buckets of 127 and of the config's 128 first differ at a distance of 90.
    "t5-other_buckets": (t5, T5Config(max_distance=127), "end at a distance of 127, and those of a T5Stack at 128"),
    "ministral-factor_of_queries": (ministral, RopeConfig(theta=500.0), "llama_4_scaling_beta"),
    # Within the first dozens of tokens each of these is plain RoPE.
    "llama-self_extend": (llama, {"scheme": "self_extend", "group": 4, "window": 64}, "no such mechanism"),
    "llama-rerope": (llama, {"scheme": "rerope", "window": 100}, "no such mechanism"),
    "llama-clamp": (llama, CLAMP, "no such mechanism"),
    "llama-interleaved_clamp": (llama, {"scheme": "interleaved", "other": CLAMP, "every": 2}, "no such mechanism"),
    "llama-distant_scale": (llama, ["rope", {"scheme": "llama4_scale", "floor_scale": 64}], "no such mechanism"),
    "bert-sinusoidal_and_rope": (bert, ["sinusoidal", "rope"], "no such vectors here"),
}


def patched(build: Callable[[], PreTrainedModel], scheme: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build()
    return randomize(hf_posenc.patch_model(model, scheme(model) if callable(scheme) else scheme))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exported")
    for name, (build, scheme) in EXPRESSIBLE.items():
        model = patched(build, scheme)
        before = outputs(model)
        hf_posenc.export_model(model, root / name)
        assert torch.equal(outputs(model), before), "exporting changed the model"
        write_reference(model, root / name)
    return root


@pytest.fixture(scope="module")
def loaded_by_stock(exported: Path) -> dict[str, Any]:
    return results_of("stock", exported)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_stock_transformers_runs_the_export(loaded_by_stock: dict[str, Any], name: str) -> None:
    result = loaded_by_stock[name]
    assert not result["imported"]
    assert result["keys"] == []
    assert result["difference"] <= 1e-5


@pytest.mark.parametrize("name", INEXPRESSIBLE)
def test_what_stock_cannot_say_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    build, scheme, reason = INEXPRESSIBLE[name]
    model = patched(build, scheme)
    before = outputs(model)
    with pytest.raises(
        UnsupportedError, match=f"Plain transformers cannot run(.|\\n)*({reason})(.|\\n)*What can be done"
    ):
        hf_posenc.export_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(outputs(model), before)


def test_a_config_that_its_class_does_not_accept_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "CARRIERS", [one for one in target.CARRIERS if one.form is own_class])
    model = patched(phi3, NativeConfig(scaling=LinearScaling(factor=4.0)))
    with pytest.raises(UnsupportedError, match=r"A Phi3Config does not accept it: .* must be one of \['longrope'\]"):
        hf_posenc.export_model(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    assert proposal(find_target("stock"), ModelParts(model)) == ""


@pytest.mark.parametrize(
    ("build", "scheme", "wrong", "place"),
    [
        (llama, RopeConfig(theta=500.0), {"rope_theta": 501.0}, "prefill at the positions 0 to 47"),
        # A scaling that is lost on the way changes nothing before its original length.
        (
            long_llama,
            RopeConfig(scaling=DynamicScaling(4.0, 8192)),
            {"rope_type": "default"},
            "at the positions 16336 to 16383",
        ),
    ],
)
def test_a_wrong_claim_does_not_survive_the_comparison(build, scheme, wrong, place, tmp_path, monkeypatch):
    def form(parts: ModelParts) -> Any:
        found = own_class(parts)
        found.config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default"} | wrong
        return found

    monkeypatch.setattr(target, "CARRIERS", (Carrier("a wrong carrier", form),))
    model = patched(build, scheme)
    with pytest.raises(UnsupportedError, match=f"a wrong carrier: plain transformers gives different numbers.*{place}"):
        hf_posenc.export_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    report = hf_posenc.export_model(model, tmp_path / "out", approximate=True)
    assert 1e-5 < report.checks[0].difference < 2
    assert f"{report.checks[0].difference:.2g}" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "name", ["llama-none", "llama-interleaved_pairs", "llama-no_rope_layers", "gpt2-rope", "bert-rope", "bert-t5"]
)
def test_a_carrier_with_the_scheme_of_another_model_is_caught(tmp_path, monkeypatch, name):
    """The queries of a form are reordered after it was made, so the comparison of every kind of carrier must fail."""
    model = patched(*EXPRESSIBLE[name])
    carrier, form = first_form(model)
    with torch.no_grad():
        queries = next(value for key, value in form.state.items() if re.search(r"q_proj|query|\.q\.", key))
        queries.copy_(queries.flip(0))
    monkeypatch.setattr(target, "CARRIERS", (Carrier(carrier, lambda _: form),))
    with pytest.raises(UnsupportedError, match="gives different numbers"):
        hf_posenc.export_model(patched(*EXPRESSIBLE[name]), tmp_path / "out")


def first_form(model: PreTrainedModel) -> Any:
    """The first carrier that takes a model, and what it makes of it."""
    for carrier in target.CARRIERS:
        with contextlib.suppress(UnsupportedError):
            if carrier.fits(model):
                return carrier.name, carrier.form_of(ModelParts(model), "")
    raise AssertionError("no carrier")


def test_bfloat16_sharded_and_training_models_export(tmp_path: Path) -> None:
    model = patched(llama, RopeConfig(theta=500.0)).to(torch.bfloat16).train()
    hf_posenc.export_model(model, tmp_path / "out", max_shard_size="10KB")
    assert model.training
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert not hasattr(loaded, "position_encoding")
    assert torch.allclose(outputs(loaded).float(), outputs(model.eval()).float(), atol=0.1)


def test_vectors_that_bfloat16_rounds_are_an_approximation(tmp_path: Path) -> None:
    model = patched(bert, "sinusoidal").to(torch.bfloat16)
    ways = r"export model\.float\(\): .*\n- accept the difference: approximate=True"
    with pytest.raises(UnsupportedError, match=ways):
        hf_posenc.export_model(model, tmp_path / "out")
    report = hf_posenc.export_model(model, tmp_path / "out", approximate=True)
    assert report.checks[0].allowed is None
    assert 1e-5 < report.checks[0].difference < 0.1
    hf_posenc.export_model(model.float(), tmp_path / "float32")


def test_stock_model_is_saved_as_it_is(tmp_path: Path) -> None:
    model = llama().eval()
    hf_posenc.export_model(model, tmp_path)
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model))


@pytest.mark.parametrize("scaling", [YarnScaling(4.0, 8192), DynamicScaling(4.0, 8192)], ids=["yarn", "dynamic"])
def test_a_long_context_is_compared_beyond_its_length_with_a_few_tokens(tmp_path: Path, scaling: Any) -> None:
    model = hf_posenc.patch_model(long_llama(), RopeConfig(scaling=scaling))
    seen = []

    def record(_: Any, __: Any, given: dict[str, Any]) -> None:
        positions = given.get("position_ids")
        length = given["input_ids"].shape[1]
        seen.append((length, length if positions is None else int(positions.max()) + 1))

    model.register_forward_pre_hook(record, with_kwargs=True)
    hf_posenc.export_model(model, tmp_path / "stock")
    assert max(end for _, end in seen) == 2 * 8192
    assert max(length for length, _ in seen) <= 48


def test_layers_of_a_type_are_written_with_their_own_theta(tmp_path: Path) -> None:
    model = gemma3()
    own = model.config.rope_parameters["full_attention"]["rope_theta"]
    windows = [at for at, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]
    hf_posenc.patch_model(model, RopeConfig(theta=777.0), layers=windows, elsewhere="native")
    hf_posenc.export_model(model, tmp_path, to="stock")
    written = AutoConfig.from_pretrained(tmp_path).rope_parameters
    found = {kind: (one["rope_type"], one["rope_theta"]) for kind, one in written.items()}
    assert found == {"sliding_attention": ("default", 777.0), "full_attention": ("default", own)}
    assert own != 777.0
