"""Every class that the auto mappings of text name for a model type, under two schemes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hf_posenc import UnsupportedError, native_scheme, patch_model, unpatch_model

from .population import KINDS, MAPPINGS, Pair, aliases, class_named, kinds_of
from .tiny import tiny_config
from .unbuilt import UNBUILT

#: The heads of text, and the kind of the config with which they are built, where it is not that of the main class.
HEADS = {
    "MODEL": "",
    "PRETRAINING": "",
    "CAUSAL_LM": "causal",
    "MASKED_LM": "masked",
    "SEQ_TO_SEQ_CAUSAL_LM": "seq2seq",
    "TEXT_ENCODING": "",
    "SEQUENCE_CLASSIFICATION": "",
    "TOKEN_CLASSIFICATION": "",
    "QUESTION_ANSWERING": "",
    "MULTIPLE_CHOICE": "",
    "NEXT_SENTENCE_PREDICTION": "",
    "TABLE_QUESTION_ANSWERING": "",
}
_TEXT = ("causal", "masked", "seq2seq", "text")


def classes_of(model_type: str) -> Iterator[tuple[str, Pair]]:
    """The distinct classes of a model type of text, and the pair whose config they are built with."""
    kinds = [kind for kind in KINDS if kind in kinds_of(model_type) and kind in _TEXT]
    if not kinds or model_type in aliases() or model_type in UNBUILT:
        return
    seen: set[str] = set()
    for head, kind in HEADS.items():
        named = MAPPINGS[head].get(model_type, ())
        for name in (named,) if isinstance(named, str) else named:
            if name not in seen:
                seen.add(name)
                own = next((one for one in ("seq2seq", "masked") if one in kinds), kinds[0])
                yield name, Pair(kind or own, model_type)


def refusals(model_type: str, scheme: str) -> dict[str, str]:
    """Per class of a model type why a scheme is refused, or empty; without classes that the config does not build."""
    refused = {}
    for name, pair in classes_of(model_type):
        torch.manual_seed(0)
        try:
            model: Any = class_named(name, model_type)(tiny_config(pair)).eval()
        except Exception:  # The code of a hundred architectures may raise anything.
            continue
        try:
            patch_model(model, native_scheme(model) if scheme == "native" else scheme)
            unpatch_model(model)
            refused[name] = ""
        except UnsupportedError as error:
            refused[name] = str(error)
    return refused
