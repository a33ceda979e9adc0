"""The options of `python -m benchmarks.price`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.lineup import BACK_ENDS, ENCODER_SCHEMES, LEVELS, REFERENCES, SMOLLM2_LEVEL, SMOLLM2_SCHEMES
from benchmarks.machine import DTYPES, check_device
from benchmarks.peers import PEER_GROUPS
from benchmarks.subjects import DECODE_BATCH, PHASES, Setting
from benchmarks.timing import Pace
from hf_posenc import UnknownNameError, get_scheme, list_schemes

_LEVELS = (*LEVELS, SMOLLM2_LEVEL)
_PHASES = (*PHASES, DECODE_BATCH)
_QUICK: dict[str, Any] = {
    "lengths": [512, 1024],
    "levels": ["attention", "model"],
    "schemes": ["none", "sinusoidal", "rope", "alibi", "t5"],
    "peers": ["kernel", "mask"],
    "rounds": 5,
    "cell_seconds": 10.0,
    "budget_minutes": 2.0,
    "memory_lengths": [],
}


@dataclass(frozen=True)
class Options:
    """What is measured, where, and for how long.

    Args:
        output_dir: of results, table and figure.
        setting: what all subjects share.
        pace: of the timing.
        lengths: ascending.
        levels: of `LEVELS`, and `SMOLLM2_LEVEL`.
        phases: of `PHASES`, and `DECODE_BATCH`.
        schemes: names; `None` for all of them, in an encoder for `ENCODER_SCHEMES`, and at `SMOLLM2_LEVEL` for
            `SMOLLM2_SCHEMES`.
        peers: of `PEER_GROUPS`.
        memory_lengths: ascending.
        budget_seconds: no measurement is begun after so long.
        overwrite: whether earlier results are forgotten.
    """

    output_dir: Path
    setting: Setting
    pace: Pace
    lengths: tuple[int, ...]
    levels: tuple[str, ...]
    phases: tuple[str, ...]
    schemes: tuple[str, ...] | None
    peers: tuple[str, ...]
    memory_lengths: tuple[int, ...]
    budget_seconds: float
    overwrite: bool

    def subjects_of(self, level: str) -> tuple[str, ...]:
        """The references and schemes that are measured at a level."""
        usual = {"encoder": ENCODER_SCHEMES, SMOLLM2_LEVEL: SMOLLM2_SCHEMES}.get(level) or tuple(list_schemes())
        return (*REFERENCES, *(usual if self.schemes is None else self.schemes))


def parse_options(words: Sequence[str]) -> Options:
    """Reads the command line; exits with status 2 and a sentence for what cannot work."""
    parser = _parser()
    if "--quick" in words:
        parser.set_defaults(**_QUICK)
    found = parser.parse_args(words)
    try:
        check_device(found.device)
    except BenchmarkError as error:
        parser.error(str(error))
    return Options(
        output_dir=found.output_dir,
        setting=Setting(device=found.device, dtype=found.dtype, seed=found.seed),
        pace=Pace(found.rounds, found.cell_seconds, found.subject_seconds, found.seed),
        lengths=tuple(sorted(set(found.lengths))),
        levels=_in_order(found.levels, _LEVELS),
        phases=_in_order(found.phases, _PHASES),
        schemes=None if found.schemes is None else tuple(dict.fromkeys(found.schemes)),
        peers=_in_order(found.peers, tuple(PEER_GROUPS)),
        memory_lengths=tuple(sorted(set(found.memory_lengths))),
        budget_seconds=math.inf if found.budget_minutes is None else found.budget_minutes * 60,
        overwrite=found.overwrite,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.price",
        description="Measures what each position encoding costs over the same model without any, side by side.",
        epilog="Run the same command again to go on where a run was stopped.",
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/price"), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a few schemes at two lengths, within three minutes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument(
        "--lengths", type=length_of, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384], help="tokens"
    )
    parser.add_argument(
        "--levels",
        choices=_LEVELS,
        nargs="+",
        default=LEVELS,
        help="one attention call, a small Llama, a small BERT; if named, a Llama of the shape of SmolLM2-135M",
    )
    parser.add_argument("--phases", choices=_PHASES, nargs="+", default=PHASES)
    parser.add_argument(
        "--schemes",
        type=scheme_name,
        nargs="+",
        help="names, by default all, and the usual ones in the encoder; alibi@flex_attention names a back-end too, "
        "alibi+forget_gate schemes that act together",
    )
    parser.add_argument(
        "--peers", choices=tuple(PEER_GROUPS), nargs="*", default=tuple(PEER_GROUPS), help="none if no name follows"
    )
    parser.add_argument(
        "--memory_lengths",
        type=length_of,
        nargs="*",
        default=[4096, 16384],
        help="where peak memory is measured; above 8192 only a training step of bare, rope, alibi and t5",
    )
    parser.add_argument("--rounds", type=_rounds, default=10, help="at most; never fewer than three are run")
    parser.add_argument(
        "--budget_minutes", type=_positive, help="measurements that were not begun by then are left out"
    )
    parser.add_argument(
        "--cell_seconds", type=_positive, default=240.0, help="adds no rounds after that: one level, phase and length"
    )
    parser.add_argument(
        "--subject_seconds", type=_positive, default=90.0, help="leaves out what takes longer for three rounds"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, tokens and order")
    parser.add_argument("--overwrite", action="store_true", help="forget earlier results in the folder")
    return parser


def scheme_name(text: str) -> str:
    """A name on the command line, or those of schemes that act together (`alibi+forget_gate`), checked.

    Raises:
        argparse.ArgumentTypeError: with the nearest names, if there is no such scheme or it arranges other ones; for a
            back-end that is not one of `BACK_ENDS`.
    """
    name, separator, back_end = text.partition("@")
    if separator and back_end not in BACK_ENDS:
        raise argparse.ArgumentTypeError(f"{back_end!r} is no back-end that is known here: {', '.join(BACK_ENDS)}")
    try:
        arranges = any(get_scheme(one).combinator for one in name.split("+"))
    except UnknownNameError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if arranges:
        raise argparse.ArgumentTypeError(
            f"{text!r} arranges other schemes and has no price of its own. Name the schemes in it; known: "
            f"{', '.join(list_schemes())}."
        )
    return text


def length_of(text: str) -> int:
    """A number of tokens on the command line, checked."""
    return _whole(text, 16, "tokens")


def _in_order(chosen: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    return tuple(one for one in known if one in chosen)


def _rounds(text: str) -> int:
    return _whole(text, 3, "rounds, for without a spread no ratio says anything")


def _whole(text: str, least: int, unit: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least} {unit}")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
