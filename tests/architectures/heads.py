"""Patches a tiny model of every class that the auto mappings of text name, and prints what is refused and why.

python -m tests.architectures.heads                # everything: about five minutes
python -m tests.architectures.heads t5 bart        # model types
python -m tests.architectures.heads --slice 2/8    # the third of eight parts
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from hf_posenc import UnsupportedError, native_scheme, patch_model, unpatch_model

from .population import KINDS, MAPPINGS, Pair, class_named, kinds_of, model_types
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
#: Position tables or rotations that `native_scheme` has no name for are a refusal of the scheme, not of the class.
SCHEMES = ("native", "alibi")


def text_types() -> list[str]:
    """All model types that read text only."""
    return [name for name in model_types() if name not in UNBUILT and set(kinds_of(name)) & set(_TEXT)]


def classes_of(model_type: str) -> Iterator[tuple[str, Pair]]:
    """The distinct classes of a model type, and the pair whose config they are built with. The main class is first."""
    kinds = [kind for kind in KINDS if kind in kinds_of(model_type)]
    seen: set[str] = set()
    for head, kind in HEADS.items():
        named = MAPPINGS[head].get(model_type, ())
        for name in (named,) if isinstance(named, str) else named:
            if name not in seen:
                seen.add(name)
                own = next((one for one in ("seq2seq", "masked") if one in kinds), kinds[0])
                yield name, Pair(kind or own, model_type)


def outcome(name: str, pair: Pair) -> dict[str, str]:
    """Per scheme "ok", or why it is refused."""
    torch.manual_seed(0)
    model: Any = class_named(name, pair.model_type)(tiny_config(pair)).eval()
    found = {}
    for scheme in SCHEMES:
        try:
            patch_model(model, native_scheme(model) if scheme == "native" else scheme)
            unpatch_model(model)
            found[scheme] = "ok"
        except UnsupportedError as error:
            found[scheme] = str(error)
    return found


def main() -> int:
    """Prints classes that are refused although another class of the model type is not; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="model types")
    parser.add_argument("--slice", default="0/1", help="PART/PARTS")
    parser.add_argument("--verbose", action="store_true", help="also print refusals that all classes share")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    part, parts = map(int, arguments.slice.split("/"))
    built = failed = 0
    for model_type in (arguments.only or text_types())[part::parts]:
        answers = {}
        for name, pair in classes_of(model_type):
            try:
                answers[name] = outcome(name, pair)
            except Exception as error:
                answers[name] = dict.fromkeys(SCHEMES, f"{type(error).__name__}: {error}")
        built += len(answers)
        for scheme in SCHEMES:
            refused = {name: answer[scheme] for name, answer in answers.items() if answer[scheme] != "ok"}
            shared = len(refused) == len(answers)
            failed += 0 if shared else len(refused)
            for name, why in refused.items():
                if not shared or (arguments.verbose and "cannot be patched:" not in why and "attends only" not in why):
                    print(
                        f"{'all ' if shared else ''}{model_type} {name} {scheme}: {' '.join(why.split())[:400]}",
                        flush=True,
                    )
    print(f"{built} classes, {failed} refused where another class of the model type is not")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
