"""Models with sparse or approximate attention take what is added to embeddings, and nothing else."""

from __future__ import annotations

import copy
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LEDConfig, LEDForConditionalGeneration

from hf_posenc import (
    SinusoidalConfig,
    UnsupportedError,
    export_model,
    extend_context,
    native_scheme,
    patch_model,
    unpatch_model,
)
from hf_posenc.recipes import swap_scheme
from tests.architectures.calling import Caller
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.models import VOCABULARY, tiny
from tests.patching.test_changed_models import Beside
from tests.schemes.table import seeds

#: A text that has to be padded to a multiple of the windows, and the native and the longer length.
SHORT, NATIVE, LONG = 50, 64, 160
#: Rounding of sums in another order.
CLOSE = 1e-5


def longformer() -> Any:
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    return tiny("LongformerForMaskedLM", attention_window=[8, 4], max_position_embeddings=NATIVE + 2, **special)


def led() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": VOCABULARY, "dropout": 0.0}
    lengths = {"max_encoder_position_embeddings": NATIVE, "max_decoder_position_embeddings": NATIVE // 2}
    return LEDForConditionalGeneration(LEDConfig(attention_window=[8, 4], **sizes, **heads, **lengths))


MODELS = {"longformer": longformer, "led": led}
#: By their names in the sweep of all architectures.
OTHERS = ("masked-big_bird", "seq2seq-bigbird_pegasus", "masked-nystromformer", "masked-yoso")

#: Attention with biases that a patch silences, by the names in the sweep, with options: modules that return zeros.
WITH_BIASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("seq2seq-longt5", {}, ("relative_attention_bias",)),
    (
        "seq2seq-longt5",
        {"encoder_attention_type": "transient-global"},
        ("relative_attention_bias", "global_relative_attention_bias"),
    ),
    ("audio-gemma3n_audio", {}, ("pos_proj",)),
    ("audio-gemma4_audio", {}, ("relative_k_proj",)),
    ("audio-granite_speech5_encoder", {}, ("rel_pos_emb",)),
]


@pytest.fixture(params=[*MODELS])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = MODELS[request.param]().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3)
    return made


def tokens(length: int, rows: int = 1) -> Tensor:
    return torch.randint(5, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def logits(model: Any, ids: Tensor | None = None, **given: Any) -> Tensor:
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens(20)
    found: Tensor = model(input_ids=ids, **given).logits
    return found


def rows_of(model: nn.Module) -> list[int]:
    return [len(one.weight) for name, one in model.named_modules() if "position" in name and hasattr(one, "weight")]


def test_the_native_table_in_its_place_changes_nothing(model: Any) -> None:
    padded = torch.ones(1, SHORT, dtype=torch.int64)
    padded[:, -9:] = 0
    everywhere = torch.zeros(1, SHORT, dtype=torch.int64)
    everywhere[:, 0] = 1
    vectors = model.get_input_embeddings()(tokens(SHORT)).detach()
    calls: list[dict[str, Any]] = [
        {"ids": tokens(SHORT)},
        {"ids": tokens(SHORT), "attention_mask": padded},
        {"ids": tokens(SHORT), "global_attention_mask": everywhere},
        {"inputs_embeds": vectors, "attention_mask": padded},
    ]
    stock = [logits(model, **call) for call in calls]
    patch_model(model, native_scheme(model))
    assert all(torch.equal(logits(model, **call), own) for call, own in zip(calls, stock, strict=True))
    unpatch_model(model)
    assert all(torch.equal(logits(model, **call), own) for call, own in zip(calls, stock, strict=True))


def test_a_repeated_table_is_a_stock_model_with_a_longer_one(model: Any, tmp_path: Path) -> None:
    stock = copy.deepcopy(model)
    swap_scheme(model, "learned", num_positions=LONG, table_extension="repeat")
    extend_context(model, length=LONG)
    text = tokens(LONG - 3)
    ours = logits(model, text)

    by_hand = copy.deepcopy(stock)
    for name, table in stock.named_modules():
        if isinstance(table, nn.Embedding) and "position" in name:
            before = 0 if model.config.is_encoder_decoder else 2
            rows = table.weight.detach()[before:]
            repeated = rows[torch.arange(LONG) % len(rows)]
            by_hand.get_submodule(name).weight = nn.Parameter(torch.cat((table.weight.detach()[:before], repeated)))
    torch.testing.assert_close(ours, logits(by_hand, text), atol=CLOSE, rtol=0.0)

    model.save_pretrained(tmp_path / "patched")
    loaded = type(model).from_pretrained(tmp_path / "patched").eval()
    assert torch.equal(logits(loaded, text), ours)

    export_model(model, tmp_path / "stock")
    exported = type(model).from_pretrained(tmp_path / "stock").eval()
    assert not hasattr(exported, "position_encoding")
    assert rows_of(exported) == rows_of(by_hand)
    torch.testing.assert_close(logits(exported, text), ours, atol=CLOSE, rtol=0.0)
    stated = {name: value for name, value in exported.config.to_dict().items() if name.endswith("position_embeddings")}
    assert set(stated.values()) == ({LONG} if model.config.is_encoder_decoder else {LONG + 2})

    for one in (model, loaded):
        unpatch_model(one)
        assert torch.equal(logits(one, tokens(SHORT)), logits(stock, tokens(SHORT)))
        assert one.config.to_dict()["attention_window"] == stock.config.attention_window


def test_led_writes_past_its_native_length() -> None:
    model = led().eval()
    swap_scheme(model, "learned", num_positions=LONG, table_extension="repeat")
    settings = {"max_new_tokens": NATIVE, "min_new_tokens": NATIVE, "do_sample": False}
    found = model.generate(tokens(LONG), **settings)
    assert found.shape[1] > NATIVE > NATIVE // 2
    assert torch.equal(model.generate(tokens(LONG), use_cache=False, **settings), found)


@pytest.mark.parametrize("scheme", ["none", "sinusoidal"])
def test_left_padding_changes_nothing(model: Any, scheme: str) -> None:
    patch_model(model, scheme)
    text = tokens(SHORT)
    padded = torch.cat((torch.ones_like(text[:, :7]), text), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :7] = 0
    found = logits(model, padded, attention_mask=mask)
    found = found if model.config.is_encoder_decoder else found[:, 7:]
    torch.testing.assert_close(found, logits(model, text), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_others_take_a_longer_table(name: str, tmp_path: Path) -> None:
    model = tiny_model(pair_named(name))
    stock = logits(model, tokens(SHORT))
    patch_model(model, native_scheme(model))
    assert torch.equal(logits(model, tokens(SHORT)), stock)
    swap_scheme(model, "learned", num_positions=LONG, table_extension="repeat")
    ours = logits(model, tokens(LONG))
    export_model(model, tmp_path)
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path), tokens(LONG)), ours, atol=CLOSE, rtol=0.0)
    with pytest.raises(UnsupportedError, match="never computed"):
        patch_model(model, "rope")


def test_a_big_bird_reads_long_texts_in_blocks() -> None:
    model = tiny_model(pair_named("masked-big_bird"), block_size=4, num_random_blocks=1)
    assert model.bert.attention_type == "block_sparse"
    stock = logits(model, tokens(SHORT + 3))
    patch_model(model, native_scheme(model))
    assert torch.equal(logits(model, tokens(SHORT + 3)), stock)
    # A short run and a short text do not end that, and a short text read by the model itself does.
    assert model.bert.attention_type == "block_sparse"
    logits(model, tokens(8))
    assert model.bert.attention_type == "original_full"
    assert torch.isfinite(logits(model, tokens(SHORT))).all()


@pytest.mark.parametrize("name", ["masked-big_bird", "seq2seq-bigbird_pegasus"])
def test_the_padding_of_the_last_block_may_be_past_the_native_length(name: str) -> None:
    model = tiny_model(pair_named(name), block_size=4, num_random_blocks=1)
    swap_scheme(model, "learned", num_positions=LONG, table_extension="repeat")
    stock = tiny_model(pair_named(name), block_size=4, num_random_blocks=1, max_position_embeddings=LONG)
    weights = {key: weight for key, weight in model.state_dict().items() if key in stock.state_dict()}
    tables = [key for key, weight in stock.state_dict().items() if weight.shape != model.state_dict()[key].shape]
    assert tables
    stock.load_state_dict(
        weights | {key: weights[key][torch.arange(LONG) % len(weights[key])] for key in tables}, strict=False
    )
    text = tokens(LONG - 3)
    torch.testing.assert_close(logits(model, text), logits(stock, text), atol=CLOSE, rtol=0.0)


def test_a_layer_of_sparse_attention_may_be_dropped_and_not_be_the_first_twice(model: Any) -> None:
    patch_model(model, "sinusoidal")
    stack = model.led.encoder if model.config.is_encoder_decoder else model.longformer.encoder
    layers = stack.layers if model.config.is_encoder_decoder else stack.layer
    del layers[1]
    assert torch.isfinite(logits(model, tokens(SHORT))).all()


class Counted(Beside):
    """Embeddings to which other code adds positions of its own."""

    def forward(self, **given: Any) -> Tensor:
        vectors: Tensor = self.inner(**given)
        return vectors + torch.arange(vectors.shape[1]).view(1, -1, 1)


def test_positions_of_other_code_before_sparse_attention_are_found() -> None:
    model = longformer().eval()
    model.longformer.embeddings = Counted(model.longformer.embeddings)
    with pytest.raises(UnsupportedError, match="depends on the position of tokens"):
        patch_model(model, "sinusoidal")
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("name", "options", "silent"), WITH_BIASES, ids=str)
def test_a_bias_in_sparse_attention_is_silenced_and_vectors_are_added(
    name: str, options: dict[str, Any], silent: tuple[str, ...]
) -> None:
    caller = Caller(replace(pair_named(name), options=tuple(options.items())))
    model = caller.model
    stock = caller.outputs()
    for scheme, vectors in (("none", False), ("sinusoidal", True)):
        patch_model(model, scheme)
        ours = caller.outputs()
        unpatch_model(model)
        assert torch.equal(caller.outputs(), stock)
        with ExitStack() as changes:
            for path, module in model.named_modules():
                if path.rpartition(".")[2] in silent:
                    changes.enter_context(module.register_forward_hook(lambda *given: torch.zeros_like(given[2])))
                if vectors and re.search(r"(block|layers|conformer)\.0$", path):
                    changes.enter_context(module.register_forward_pre_hook(with_sinusoids))
            by_hand = caller.outputs()
        torch.testing.assert_close(ours, by_hand, atol=CLOSE, rtol=CLOSE)
        assert (ours - stock).abs().max() > 100 * CLOSE


def with_sinusoids(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Adds the vectors of Vaswani et al. to hidden states."""
    length, width = given[0].shape[-2:]
    vectors = [seeds.sinusoidal(SinusoidalConfig(), None, width, position, 0) for position in range(length)]
    return given[0] + torch.tensor(vectors), *given[1:]
