"""`native_scheme` compares a declared mechanism with what the model computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_posenc import UnsupportedError, native_scheme, patch_model
from tests.matrix.architectures import enlarged
from tests.matrix.running import patched, tokens
from tests.models import tiny
from tests.thinning import in_turn


@pytest.mark.parametrize("scheme", ["t5", "alibi", "native"])
@pytest.mark.parametrize("family", ["T5", "UMT5"])
def test_tables_that_a_model_reads_in_another_way_are_not_adopted(family: str, scheme: str) -> None:
    """As in a version of transformers whose buckets are others: the weights fit, and mean something else."""
    # With sdpa UMT5 is refused before transformers 5.18, for what it masks.
    model = enlarged(tiny(f"{family}ForConditionalGeneration", attn_implementation="eager"))
    for block in model.decoder.block:
        block.layer[0].SelfAttention.compute_bias = other_buckets(block.layer[0].SelfAttention)
    with pytest.raises(UnsupportedError, match="does not compute the same as T5Config"):
        patch_model(model, scheme)
    assert not hasattr(model, "position_encoding")
    assert all(name not in module.__dict__ for module in model.modules() for name in ("forward", "_old_forward"))


def other_buckets(attention: Any) -> Any:
    inner = attention.compute_bias

    def compute_bias(*args: Any, **kwargs: Any) -> torch.Tensor:
        return inner(*args, **kwargs).flip(1)

    return compute_bias


@pytest.mark.parametrize("scaled", [{"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}])
@torch.no_grad()
def test_layers_whose_phases_agree_at_first_have_the_module_of_their_own_type(scaled: dict) -> None:
    """Dynamic scaling acts past the trained length, so nothing shows it at three tokens."""
    parameters = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": scaled}
    stock = patched("gemma3_two_rotaries", None, rope_parameters=parameters)
    model, ids = patched("gemma3_two_rotaries", None, rope_parameters=parameters), tokens(1, 100)
    patch_model(model, native_scheme(model))
    expected = stock(ids, use_cache=False).logits
    assert float((model(ids, use_cache=False).logits - expected).abs().max()) <= 1e-4


def layer_tables(model: Any) -> list[torch.Tensor]:
    # In every layer, or since transformers 5.24 in one module.
    return [module.embed_positions for module in model.modules() if hasattr(module, "embed_positions")]


FIXED: dict[str, tuple[Any, Any]] = {
    "ctrl": (lambda: tiny("CTRLLMHeadModel", dff=48), lambda model: [model.transformer.pos_encoding]),
    "roformer": (
        lambda: tiny("RoFormerForMaskedLM"),
        lambda model: [model.roformer.encoder.embed_positions.weight],
    ),
    "gptj": (lambda: tiny("GPTJForCausalLM", rotary_dim=4), layer_tables),
    "codegen": (lambda: tiny("CodeGenForCausalLM", rotary_dim=4), layer_tables),
}


@pytest.mark.parametrize(("name", "row"), in_turn(FIXED, [0, 8, 40]))
def test_rows_that_the_run_does_not_reach_are_compared_too(name: str, row: int) -> None:
    build, tables = FIXED[name]
    model = enlarged(build())
    native_scheme(model)
    with torch.no_grad():
        tables(model)[-1][row:].mul_(-1)
    which = ": its rows" if row else ""
    with pytest.raises(UnsupportedError, match=f"does not match the declaration of its architecture{which}"):
        native_scheme(model)


@pytest.mark.parametrize(("name", "dtype"), in_turn(FIXED, [torch.bfloat16, torch.float16]))
def test_the_tables_of_a_cast_model_are_recognised(name: str, dtype: torch.dtype) -> None:
    build, _ = FIXED[name]
    model = enlarged(build()).to(dtype)
    expected = {"ctrl": "sinusoidal"}.get(name, "rope")
    assert native_scheme(model).name == expected


def test_the_angles_of_a_long_table_may_have_the_rounding_of_float32() -> None:
    """CTRL's own length: its angles are float32 products, off by 2e-3 at the last row."""
    model = enlarged(tiny("CTRLLMHeadModel", dff=48, n_positions=50_000))
    assert native_scheme(model).name == "sinusoidal"


_DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "factor": 4.0,
}
LENGTH_DEPENDENT = [(_DYNAMIC, {"factor": 8.0}), (_LONGROPE, {"long_factor": [9.0] * 4})]


def llama_that_rotates_by_length(parameters: dict[str, Any]) -> Any:
    # Copied, because a config keeps the dictionary that it is given.
    return patched("llama_gqa", None, rope_parameters=copy.deepcopy(parameters), max_position_embeddings=16)


@pytest.mark.filterwarnings("ignore:Scheme 'rope.* depends on the length")
@pytest.mark.parametrize(("parameters", "change"), LENGTH_DEPENDENT)
@torch.no_grad()
def test_the_config_of_the_rotary_module_decides(parameters: dict[str, Any], change: dict[str, Any]) -> None:
    model, ids = llama_that_rotates_by_length(parameters), tokens(1, 40)
    model.config = model.model.config = copy.deepcopy(model.config)
    model.config.rope_parameters |= change
    expected = model(ids, use_cache=False).logits
    patch_model(model, "native")
    assert float((model(ids, use_cache=False).logits - expected).abs().max()) <= 1e-4


@pytest.mark.filterwarnings("ignore:Scheme 'rope.* depends on the length")
@torch.no_grad()
def test_frequencies_for_long_sequences_that_a_module_keeps_are_compared_with_its_config() -> None:
    model, ids = llama_that_rotates_by_length(_LONGROPE), tokens(1, 40)
    before = model(ids, use_cache=False).logits
    model.config.rope_parameters["long_factor"] = [9.0] * 4
    after = model(ids, use_cache=False).logits
    if torch.equal(before, after):
        with pytest.raises(UnsupportedError, match="build the model from the config that you want"):
            native_scheme(model)
    else:  # Transformers up to 5.20 reads the config again for every long sequence, and so does the scheme.
        patch_model(model, native_scheme(model))
        assert float((model(ids, use_cache=False).logits - after).abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("parameters", "dtype"), in_turn([_DYNAMIC, _LONGROPE, _DEFAULT], [torch.bfloat16, torch.float16]), ids=str
)
def test_rounded_frequencies_of_a_cast_model_are_those_of_its_config(
    parameters: dict[str, Any], dtype: torch.dtype
) -> None:
    scheme = native_scheme(llama_that_rotates_by_length(parameters).to(dtype))
    assert scheme.name == "rope"
    assert (scheme.to_dict()["scaling"] or {"type": "default"})["type"] == parameters["rope_type"]


@pytest.mark.parametrize("parameters", [_DYNAMIC, _LONGROPE])
def test_looking_at_a_rotary_module_leaves_its_buffers_alone(parameters: dict[str, Any]) -> None:
    model = llama_that_rotates_by_length(parameters)
    rotary = model.model.rotary_emb
    model(tokens(1, 3), use_cache=False)
    before = {name: value.clone() for name, value in vars(rotary).items() if isinstance(value, torch.Tensor)}
    before |= {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    native_scheme(model)
    assert all(torch.equal(getattr(rotary, name), value) for name, value in before.items())
