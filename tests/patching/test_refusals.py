"""What cannot be computed right is refused at the call, with words that help; what can, works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPModel,
    LlavaConfig,
    LlavaModel,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    WhisperConfig,
    WhisperModel,
    __version__,
)

from hf_posenc import (
    BuildContext,
    DistanceBias,
    NoneConfig,
    SchemeParts,
    UnsupportedError,
    inspect_model,
    native_scheme,
    patch_model,
    unpatch_model,
)
from tests.matrix.running import distance, patched, tokens
from tests.models import tiny
from tests.patching.test_prompt_learning import uses_cache

SELF_EXTEND = {"scheme": "self_extend", "window": 4, "group": 2}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def continued(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    result: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **(GREEDY | arguments))
    return result


# Assisted decoding


def assistant(scheme: Any) -> Any:
    """Agrees with the model it assists now and then."""
    model = patched("llama_gqa", scheme)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("scheme", [SELF_EXTEND, "forget_gate", "alibi"], ids=str)
def test_a_generated_token_with_the_id_of_the_padding_is_a_token_for_an_assistant(scheme: Any) -> None:
    model, helper, ids = patched("llama_gqa", "rope"), assistant(scheme), tokens(1, 8, 2)
    expected = continued(model, ids, max_new_tokens=16, use_cache=False)
    assert (expected == GREEDY["pad_token_id"]).any()
    seen = []
    helper.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    assert torch.equal(continued(model, ids, max_new_tokens=16, assistant_model=helper), expected)
    assert seen
    assert all(mask is None or mask.all() for mask in seen)  # nothing is taken for padding
    other_way = continued(helper, ids, max_new_tokens=16, use_cache=False)
    assert torch.equal(continued(helper, ids, max_new_tokens=16, assistant_model=model), other_way)


@pytest.mark.parametrize(
    "asked",
    [{"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}, {"prefill_chunk_size": 3}, {"assistant_model": 1}],
    ids=lambda asked: next(iter(asked)),
)
def test_a_scheme_that_no_cache_serves_refuses_what_needs_one(asked: dict[str, Any]) -> None:
    model, ids = patched("llama_gqa", "normalized_integer"), tokens(1, 8)
    (name,) = asked
    if name == "assistant_model":
        asked = {name: patched("llama_gqa", None)}
    ran = []
    hook = model.model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(UnsupportedError, match=f"{name} needs a growing cache, which cannot run"):
        continued(model, ids, max_new_tokens=4, **asked)
    hook.remove()
    assert not ran
    assert continued(model, ids, max_new_tokens=4).shape == (1, 12)


def test_an_assistant_that_no_cache_serves_is_refused_by_its_name() -> None:
    stock, helper, ids = patched("llama_gqa", None), patched("llama_gqa", "normalized_integer"), tokens(1, 8)
    with pytest.raises(UnsupportedError, match=r"This assistant model cannot draft.*the scheme 'normalized_integer'"):
        continued(stock, ids, max_new_tokens=6, assistant_model=helper)


def test_a_cache_that_is_asked_for_is_refused_where_it_would_be_wrong() -> None:
    model, ids = patched("llama_gqa", "normalized_integer"), tokens(1, 8)
    with pytest.raises(UnsupportedError, match="Generate with use_cache=False"):
        continued(model, ids, max_new_tokens=4, use_cache=True)


# Prefix tuning


def with_prefix(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with torch.no_grad():
        tuned.prompt_encoder["default"].embedding.weight.normal_(std=0.5)
    return tuned.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["native", "xpos", "alibi", "shaw", SELF_EXTEND, "sinusoidal", "ssmax"], ids=str)
@pytest.mark.parametrize("architecture", ["llama_gqa", "gpt2"])
@torch.no_grad()
def test_keys_of_a_prefix_are_used_as_they_are_learned(architecture: str, scheme: Any) -> None:
    model, ids = with_prefix(patched(architecture, scheme)), tokens(2, 9)
    if scheme == "native":
        stock = with_prefix(patched(architecture, None))
        assert distance(model(input_ids=ids).logits, stock(input_ids=ids).logits) <= 1e-6
    expected = ids
    for _ in range(4):
        logits = model(input_ids=expected, attention_mask=torch.ones_like(expected)).logits
        expected = torch.cat((expected, logits[:, -1:].argmax(-1)), dim=1)
    if not uses_cache(model, ids):
        return
    settings = GREEDY | {"max_new_tokens": 4}
    assert torch.equal(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("scheme", "part", "width"), [("pope", "PopeMap", 16), ("forget_gate", "ForgetGateBias", 12)])
@torch.no_grad()
def test_a_prefix_cannot_say_what_a_scheme_adds_to_keys(scheme: str, part: str, width: int) -> None:
    model, ids = with_prefix(patched("llama_gqa", scheme)), tokens(2, 9)
    reason = f"The cache holds keys of width 8, but with {part} this LlamaAttention caches keys of width"
    with pytest.raises(UnsupportedError, match=reason) as refusal:
        model(input_ids=ids)
    assert f"width {width}." in str(refusal.value)
    assert "Use LoRA or prompt tuning with this scheme" in str(refusal.value)


# Models of more than text

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def qwen() -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32, "intermediate_size": 48}
    ids = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    config = Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **ids)
    return Qwen2_5_VLModel(config).eval()


def whisper() -> Any:
    return WhisperModel(
        WhisperConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=96, pad_token_id=0,
        )
    ).eval()  # fmt: skip


def llava() -> Any:
    text = {"model_type": "llama"} | TEXT
    return LlavaModel(LlavaConfig(text_config=text, vision_config={"model_type": "clip_vision_model"} | VISION)).eval()


def clip() -> Any:
    text = TEXT | {"num_key_value_heads": None}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=32)).eval()


def refusal_of(part: Any) -> str:
    """The words with which every verb refuses a part, the same for each."""
    said = set()
    for call in (
        lambda: patch_model(part, "native"),
        lambda: patch_model(part, "none"),
        lambda: patch_model(part, "rope_nd"),
        lambda: patch_model(part, "learned"),
        lambda: native_scheme(part),
        lambda: inspect_model(part),
    ):
        with pytest.raises(UnsupportedError) as refusal:
            call()
        said.add(str(refusal.value))
    (words,) = said
    return words


@pytest.mark.parametrize("path", ["encoder", "decoder"])
def test_an_encoder_or_decoder_that_is_saved_with_its_model_is_refused_by_every_verb(path: str) -> None:
    said = refusal_of(whisper().get_submodule(path))
    assert "is a part of a model and is saved with it" in said
    assert "`part=` chooses the part" in said


def test_a_part_of_a_text_model_points_to_the_whole_and_that_works() -> None:
    model = patched("bart", None)
    assert "Patch the whole model" in refusal_of(model.model.decoder)
    patch_model(model, "none")


@pytest.mark.parametrize(("build", "path"), [(qwen, "language_model"), (llava, "language_model"), (clip, "text_model")])
@torch.no_grad()
def test_the_text_part_of_a_composite_takes_its_native_scheme(build: Any, path: str) -> None:
    part: PreTrainedModel = build().get_submodule(path)
    for parameter in part.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.25)
    ids = tokens(2, 9)
    stock = part(input_ids=ids).last_hidden_state
    try:
        native_scheme(part)
    except UnsupportedError as error:
        # The text part of an early version takes positions on three axes only.
        known = build is qwen and "more than one axis" in str(error)
        if not known or not __version__.startswith(("5.17.", "5.18.")):
            raise
        pytest.skip(f"transformers {__version__}: {error}")
    assert distance(patch_model(part, "native")(input_ids=ids).last_hidden_state, stock) <= 1e-5
    assert distance(patch_model(part, "none")(input_ids=ids).last_hidden_state, stock) > 1e-2
    assert torch.equal(unpatch_model(part)(input_ids=ids).last_hidden_state, stock)


def test_a_bias_of_the_wrong_shape_is_named_when_it_is_placed() -> None:
    class FlatBias(DistanceBias):
        def forward(self, distance: torch.Tensor) -> torch.Tensor:
            return -distance.abs().float()

    class FlatConfig(NoneConfig):
        name = "flat_for_tests"

        def build(self, context: BuildContext) -> SchemeParts:
            return SchemeParts(logit_bias=FlatBias())

    message = r"FlatBias.forward returned the shape \(3,\) for distances of the shape \(3,\); expected \(heads, 3\)"
    model = tiny("LlamaForCausalLM")
    with pytest.raises(ValueError, match=message):
        patch_model(model, FlatConfig())
    assert not hasattr(model, "position_encoding")


def test_a_bias_that_reads_its_distances_is_placed_in_a_model_without_weights() -> None:
    class ReadingBias(DistanceBias):
        def forward(self, distance: torch.Tensor) -> torch.Tensor:
            reach = int(distance.abs().max())
            return -(distance.abs() / max(reach, 1)).expand(2, *distance.shape)

    class ReadingConfig(NoneConfig):
        name = "reading_for_tests"

        def build(self, context: BuildContext) -> SchemeParts:
            return SchemeParts(logit_bias=ReadingBias())

    with torch.device("meta"):
        model = patch_model(tiny("LlamaForCausalLM"), ReadingConfig())
    assert next(model.parameters()).is_meta
    assert isinstance(model.position_encoding.config, ReadingConfig)
