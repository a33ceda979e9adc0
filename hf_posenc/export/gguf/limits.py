"""Which differences between llama.cpp and the model are accepted."""

from __future__ import annotations

from hf_posenc.export.gguf.differences import Differences
from hf_posenc.export.gguf.run import runtime
from hf_posenc.export.gguf.verify import SAME_GELU
from hf_posenc.export.records import Check

#: Largest accepted differences. In float32, the programs differ in the order of sums and in llama.cpp's angles, which
#: it computes by repeated multiplication.
_EXACT = {"logits": 1e-4, "probabilities": 1e-3, "hidden states": 1e-4}
#: llama.cpp's GELU is a table of float16. It alone changes the hidden states of a stock MiniLM by 2e-3, those of a
#: MiniLM with other positions by up to 5e-3, and the logits of random GPT-2 models with 2 to 12 layers by up to 1.2e-3.
_GELU = 2e-2
#: With that GELU in the model too, a different order of sums can still lead to the next entry of the table: a noise of
#: 1e-7 in the embeddings changes the hidden states of MiniLM by 2e-4. Up to 6e-4 was measured. Wrong positions change
#: more: one wrong row of 512 in a table 6e-2, a base of RoPE that is wrong by 1 % 2e-2, lost ALiBi 0.8.
#: A new model (weights of std 0.02) hardly depends on positions, so there a wrong slope or base can stay below this.
_SAME_GELU = 2e-3
#: The same for rounded weights. A position encoding that is lost or wrong changes more (see tests/export/test_gguf.py),
#: and is found before, because the carrier is first compared in float32.
_ROUNDED = {
    "f16": {"logits": 1e-2, "probabilities": 1e-2, "hidden states": 1e-2},
    "q8_0": {"logits": 0.25, "probabilities": 0.15, "hidden states": 0.25},
}


def limits(found: Differences, dtype: str) -> Differences:
    """The largest accepted differences.

    Args:
        found: the differences, by what was compared.
        dtype: precision of the file.
    """
    of_precision = _ROUNDED.get(dtype, _EXACT)
    allowed = {}
    for what in found:
        exact = of_precision[what.removesuffix(SAME_GELU)]
        if what.endswith(SAME_GELU):
            allowed[what] = max(exact, _SAME_GELU)
        else:
            allowed[what] = max(exact, _GELU) if what + SAME_GELU in found else exact
    return allowed


def excess(found: Differences) -> str | None:
    """Says in a sentence how far a float32 file is off; `None` if it is within the limits."""
    allowed = limits(found, "f32")
    if all(value <= allowed[what] for what, value in found.items()):
        return None
    named = [
        f"the {what} by {value:.2g}{'' if 'probabilities' in what else ' of the largest'} (allowed: {allowed[what]:g})"
        for what, value in found.items()
    ]
    sentence = ", ".join([named[0].replace(" by ", " differ by ", 1), *named[1:]])
    return f"llama.cpp gives other numbers. {sentence[0].upper()}{sentence[1:]}"


def checks(found: dict[str, Differences], dtype: str, *, limited: bool = True) -> tuple[Check, ...]:
    """The differences by mode as rows of the report.

    Args:
        found: the differences.
        dtype: precision of the file.
        limited: whether they had to be within the limits.
    """
    program = f"{runtime()}, {dtype}"
    return tuple(
        Check(program, mode, what, value, limits(differences, dtype)[what] if limited else None)
        for mode, differences in found.items()
        for what, value in differences.items()
    )
