"""Which frequencies of a rotation the trained models of a study use.

python training/study/frequencies.py outputs/reference docs/study/frequencies.csv
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.find.model_parts import TEXT
from hf_posenc.patching.place.in_force import current_encoding
from hf_posenc.recipes.initialization.logits import layers_of, recorded_heads
from hf_posenc.schemes.rotary.rope import RotaryMap
from training.errors import SettingsError
from training.study.corpus import Corpus

#: Texts that are read, and how many tokens of each.
_TEXTS, _LENGTH = 64, 128


def frequency_usage(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The share of every frequency in the largest logits that each head could have.

    A pair of dimensions adds at most `|q_m| |k_m|` to a logit, at whatever distance (arXiv:2410.06205, section 4). The
    norms are means over all tokens, and the shares of a head add up to 1.

    Args:
        model: a causal model whose scheme rotates pairs, such as RoPE.
        tokens: `(texts, length)` token ids.

    Returns:
        `(layers, heads, pairs)` float32, from the fastest pair to the slowest.

    Raises:
        UnsupportedError: if the scheme is not one rotation of pairs.
    """
    encoding = current_encoding(model)
    if encoding is None:
        raise UnsupportedError(
            f"{type(model).__name__} is not patched. Patch it with its own scheme: "
            "patch_model(model, native_scheme(model))."
        )
    maps = [layer.query_key_map for layer in layers_of(encoding, TEXT)]
    if not maps or not all(isinstance(one, RotaryMap) for one in maps):
        raise UnsupportedError(f"{type(model).__name__} has no rotation of pairs, so it has no frequencies to use.")
    usage = []
    for rotation, heads in zip(maps, recorded_heads(model, encoding, tokens), strict=True):
        assert isinstance(rotation, RotaryMap)
        groups = heads.query.shape[1] // heads.key.shape[1]
        query, key = (_pair_norms(one, rotation) for one in (heads.query, heads.key))
        bound = query * key.repeat_interleave(groups, dim=0)
        usage.append(bound / bound.sum(-1, keepdim=True))
    return torch.stack(usage)


def _pair_norms(heads: Tensor, rotation: RotaryMap) -> Tensor:
    """`(heads, pairs)`: the mean norm of each rotated pair of dimensions."""
    rotated = heads[..., : rotation.rotary_dim].float()
    if rotation.layout == "interleaved":
        pairs = rotated.unflatten(-1, (-1, 2))
    else:
        pairs = rotated.unflatten(-1, (2, -1)).transpose(-1, -2)
    return pairs.norm(dim=-1).mean(dim=(0, 2))


def study_frequencies(folder: Path, scheme: str) -> pd.DataFrame:
    """One row per seed, layer, head and pair of the trained models of a scheme.

    Args:
        folder: of a study with its models and its data.
        scheme: a label of the study.

    Raises:
        SettingsError: if there is no such model.
    """
    # A training that has not ended leaves a folder with another ending.
    found = {
        path: re.fullmatch(rf"causal-{re.escape(scheme)}-seed(\d+)", path.name) for path in folder.glob("models/*")
    }
    models = {path: int(match[1]) for path, match in sorted(found.items()) if match}
    if not models:
        raise SettingsError(f"{folder} has no trained model of {scheme!r}; run the study with --save_models.")
    stream = Corpus.open_streams(folder / "data")[1].tokens()
    starts = torch.linspace(0, len(stream) - _LENGTH, _TEXTS).long().tolist()
    tokens = torch.stack([torch.from_numpy(stream[start : start + _LENGTH].astype("int64")) for start in starts])
    frames = []
    for path, seed in models.items():
        model = AutoModelForCausalLM.from_pretrained(path)
        usage = frequency_usage(model, tokens)
        index = pd.MultiIndex.from_product([range(size) for size in usage.shape], names=["layer", "head", "pair"])
        frame = pd.DataFrame({"share": usage.flatten().numpy().round(5)}, index=index).reset_index()
        frames.append(frame.assign(seed=seed))
    return pd.concat(frames, ignore_index=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the study, with models/")
    parser.add_argument("output", type=Path, help="a CSV file: one row per seed, layer, head and pair")
    parser.add_argument("--scheme", default="rope", help="label whose models are read (default: rope)")
    options = parser.parse_args(arguments)
    try:
        frame = study_frequencies(options.folder, options.scheme)
    except (SettingsError, UnsupportedError) as error:
        print(f"frequencies: {error}", file=sys.stderr)
        return 2
    frame.to_csv(options.output, index=False)
    print(f"Written to {options.output}: {frame.seed.nunique()} models, {len(frame)} rows.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
