"""Other names of schemes, and common terms that are not schemes, with hints for error messages."""

from __future__ import annotations

import json
from collections.abc import Collection

from hf_posenc.errors import close_names, did_you_mean

#: Schemes, and other words for them.
_SCHEMES_OF_WORDS = {
    "none": "no_pe nope",
    "forget_gate": "cable fox forgetting",
    "repo": "context_repositioning",
    "grape": "grape_a",
    "selective_rope": "sel_rope",
    "transformer_xl": "transformerxl txl",
    "wavelet": "ricker wave",
    "interleaved": "irope nrope rnope",
    "local_global": "rnope_swa",
    "hierarchical": "bipe",
    "attention_sinks": "streaming_llm sinks",
    "dual_chunk": "chunkllama dca",
    "learned_rope": "lerope",
    "tupe": "untied",
    "disentangled": "deberta",
    "learned sinusoidal": "absolute ape",
    "learned": "gpt wpe",
    "shaw t5 transformer_xl": "relative rpe",
    "rope": "rotary",
    "rope_nd": "axial golden_gate",
    "swin": "beit",
    "log_cpb": "continuous cpb swin_v2 swinv2",
    "alibi": "croma",
    "mrope": "mhrope mrope_i",
    "ssmax": "scalable_softmax",
    "native": "stock",
}
_SCHEMES = {word: names.split() for names, words in _SCHEMES_OF_WORDS.items() for word in words.split()}
#: Words that may follow the name of a scheme, as in "t5_bias".
_FOLLOWING = {"attention", "bias", "embedding", "embeddings", "encoding", "pe", "position", "positional", "positions"}
#: Other names of options, where a scheme has the option.
_OPTIONS = {"base": "theta", "theta": "base", "max_position_embeddings": "num_positions"}
_ORIGINAL = "factor", "original_max_positions"
#: Scalings of "rope" by their common names: type and options.
_SCALINGS = {
    "dynamic": ("dynamic", *_ORIGINAL),
    "dynamic_ntk": ("dynamic", *_ORIGINAL),
    "dynamic_yarn": ("dynamic_yarn", "original_max_positions"),
    "linear": ("linear", "factor"),
    "llama3": ("llama3", "factor"),
    "longrope": ("longrope", "short_factor", "long_factor", "original_max_positions"),
    "ntk": ("ntk", "factor"),
    "pi": ("linear", "factor"),
    "position_interpolation": ("linear", "factor"),
    "yarn": ("yarn", *_ORIGINAL),
}


#: How to make a longer table from the rows of the old one.
TABLE_EXTENSION = (
    "swap_scheme(model, scheme, table_extension='repeat') in Python, --table-extension repeat for `hf-posenc patch`, "
    "--initialization fitted --table_extension repeat for the training scripts"
)
#: Arguments of `patch_model` and `swap_scheme`, and how they are given elsewhere.
_ARGUMENTS = {
    "part": "part='text' for patch_model, --part for `hf-posenc patch`",
    "layers": "layers=[0, 1] for patch_model, --layers for `hf-posenc patch`, --scheme_layers for the training scripts",
    "elsewhere": "elsewhere='none' for patch_model, --elsewhere for `hf-posenc patch` and the training scripts",
    "cross_attention": "cross_attention=True for patch_model, --cross-attention for `hf-posenc patch`",
    "table_extension": TABLE_EXTENSION,
    "initialization": "initialization='fitted' for swap_scheme, --initialization for the training scripts",
    "sample": "sample=token_ids for swap_scheme",
    "gradual": "gradual=True for swap_scheme, --gradual_steps for the training scripts",
}


def hint_for_option(name: str, options: Collection[str] = ()) -> str:
    """Returns a hint if a name that no option has is another name of one, or closest to an argument; otherwise ""."""
    if (option := _OPTIONS.get(name)) in options:
        return f"Did you mean {option!r}?"
    for close in close_names(name.replace("-", "_"), [*_ARGUMENTS, *options], cutoff=0.8)[:1]:
        if close not in options:
            asked = f"Did you mean {close!r}? " if close != name else ""
            return f"{asked}It is not an option of a scheme, but an argument: {_ARGUMENTS[close]}."
    return ""


def hint_for(name: str, schemes: Collection[str] = ()) -> str:
    """Returns a hint for a common name that is not one of the schemes, or an empty string."""
    word = name.lower().replace("-", "_").replace(" ", "_")
    stem = "_".join(part for part in word.split("_") if part not in _FOLLOWING)
    if word == "drope":
        return "It is a training recipe, not a scheme: hf_posenc.recipes.drope(total_steps)."
    if word in _SCALINGS:
        kind, *options = _SCALINGS[word]
        given = "".join(f', "{option}": ...' for option in options)
        option = f'scaling={{"type": "{kind}"{given}}}'  # the same in Python, in a shell and in a settings file
        return f"It is an option of 'native' (for a trained model with RoPE) and of 'rope': {option}."
    several = [part.strip("_") for part in word.replace("+", ",").split(",")]
    if len(several) > 1 and all(part in schemes for part in several):
        return f"Several schemes at once are a list: {json.dumps(several)}."
    return did_you_mean(_SCHEMES.get(word) or _SCHEMES.get(stem) or [stem] * (stem in schemes))
