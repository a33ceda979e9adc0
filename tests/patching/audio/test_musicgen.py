"""MusicGen past its native length: its decoder reads the codes of a sound, in the melody model behind a prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_posenc import (
    UnsupportedError,
    export_model,
    extend_context,
    native_scheme,
    patch_model,
    unpatch_model,
)
from tests.thinning import in_turn

#: Codes of a codebook. The next number is the begin of a sound, as in the published models.
CODES, CODEBOOKS = 64, 4
#: The native length in frames, frames to generate, and the length that is set: the prefix of a melody has 243 tokens.
NATIVE, FRAMES, LONG = 32, 60, 400
#: Rounding of sums in another order.
CLOSE = 1e-5
KINDS = ("Musicgen", "MusicgenMelody")
SCHEMES = ("native", "sinusoidal", "alibi", "rope")


def musicgen(kind: str) -> Any:
    """A tiny model that makes 32 frames a second."""
    special = {"pad_token_id": CODES, "bos_token_id": CODES}
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0}
    lengths = {"vocab_size": CODES, "num_codebooks": CODEBOOKS, "max_position_embeddings": NATIVE}
    if kind == "Musicgen":
        decoder: Any = transformers.MusicgenDecoderConfig(**special, **sizes, **lengths)
    else:
        from transformers.models.musicgen_melody.configuration_musicgen_melody import MusicgenMelodyDecoderConfig

        decoder = MusicgenMelodyDecoderConfig(**special, **sizes, **lengths)
    text = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    sound = transformers.EncodecConfig(
        hidden_size=16, num_filters=4, codebook_size=CODES, codebook_dim=16, upsampling_ratios=[8, 4],
        num_lstm_layers=1, target_bandwidths=[24.0], sampling_rate=1024,
    )  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_encoder=text.to_dict(), audio_encoder=sound.to_dict(), decoder=decoder.to_dict()
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.normal_(0.0, 0.2)
    for name in ("decoder_start_token_id", "pad_token_id", "bos_token_id"):
        setattr(model.generation_config, name, CODES)
    return model


def made(model: Any, frames: int = FRAMES, **options: Any) -> tuple[Tensor, Tensor]:
    """The logits of every step, `(steps, codebooks, codes)`, and the sound, `(1, 1, samples)`."""
    prompt = torch.arange(1, 9).unsqueeze(0)
    steps: list[Tensor] = []
    hook = model.decoder.register_forward_hook(lambda module, args, output: steps.append(output.logits[:, -1]))
    with hook:
        torch.manual_seed(0)
        sound = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            guidance_scale=1.0,
            max_new_tokens=frames,
            **options,
        )
    return torch.stack(steps), sound


@pytest.mark.parametrize(("scheme", "kind"), in_turn(SCHEMES, KINDS))
@pytest.mark.filterwarnings("ignore:The rotation of")
def test_a_sound_past_the_native_length(scheme: str, kind: str, tmp_path: Path) -> None:
    model = musicgen(kind)
    stock, stock_sound = made(model)
    patch_model(model, native_scheme(model) if scheme == "native" else scheme)
    extend_context(model, length=LONG)
    assert model.config.decoder.max_position_embeddings == LONG

    ours, sound = made(model)
    assert sound.shape[-1] > NATIVE * 32
    assert torch.equal(ours, stock) == (scheme == "native")
    assert sound.shape == stock_sound.shape
    # Without a cache every step reads all frames again.
    torch.testing.assert_close(made(model, use_cache=False)[0], ours, atol=CLOSE, rtol=0.0)
    if kind == "Musicgen":  # The stock melody model has no static cache.
        assert torch.equal(made(model, cache_implementation="static")[0], ours)

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.config.decoder.max_position_embeddings == LONG
    # Loaded weights lie elsewhere in memory, and some processors then sum in another order, for the stock model too.
    torch.testing.assert_close(made(loaded)[0], ours, atol=CLOSE, rtol=0.0)

    unpatch_model(model)
    assert model.config.decoder.max_position_embeddings == NATIVE
    assert torch.equal(made(model)[0], stock)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_length_of_a_sound_is_set_by_the_user(kind: str) -> None:
    """The published models stop at 1500 frames, which is not their native length of 2048."""
    model = musicgen(kind)
    model.generation_config.max_length = 20
    extend_context(patch_model(model, "alibi"), length=LONG)
    assert model.generation_config.max_length == 20
    assert len(made(model, frames=NATIVE + 8)[0]) >= NATIVE + 8 - 1


@pytest.mark.parametrize("scheme", ["native", "alibi"])
def test_there_is_no_stock_export_of_two_vocabularies(scheme: str, tmp_path: Path) -> None:
    model = musicgen("Musicgen")
    patch_model(model, native_scheme(model) if scheme == "native" else scheme)
    with pytest.raises(UnsupportedError, match="of different vocabularies"):
        export_model(model, tmp_path)
