"""Writes the tables and figures of docs/study from the packed trainings in docs/study/runs.

python docs/study/make_pages.py             # tables and figures
python docs/study/make_pages.py --no-draw   # tables only

A table stands in a page between `<!-- table: NAME -->` and `<!-- end -->`. The text around it is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from docs.study.archive import study_in, trainings
from docs.study.claims import (
    CLAIMS,
    LENGTH,
    REACHED,
    Measure,
    Outcome,
    outcomes,
    over_texts,
    read_runs,
    verdict_of,
)
from docs.study.grid import grid_table
from docs.study.leaderboard import leaderboard_of
from docs.study.measured import frequencies_table, moved_table, precision_table
from docs.study.quoted import MASKED, quoted_table
from docs.study.rates import other_rate_table, rates_table
from docs.study.repeats import repeats_table
from docs.study.significance import prediction
from docs.study.swaps import heal_table, pretrained_heal_table
from docs.study.table_numbers import (
    LENGTHS,
    NOT_RUN,
    SCALINGS,
    Run,
    Runs,
    filled,
    finished,
    markdown,
    mean_of,
    mean_paired,
    never_reached,
    ranged,
    ranked,
    seeds_of,
    share_of_answers,
    shown,
    tail,
    tail_by_seed,
)
from training.errors import SettingsError

FOLDER = Path(__file__).resolve().parent
RUNS = FOLDER / "runs"
FIGURES = FOLDER / "figures"
PAGES = ("results.md", "leaderboard.md")


def main() -> int:
    """Writes the tables into the pages, and draws the figures. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-draw", action="store_true", help="leave the figures as they are")
    options = parser.parse_args()
    try:
        runs = read_runs(RUNS)
    except SettingsError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    for name in PAGES:
        path = FOLDER / name
        path.write_text(filled(path.read_text(encoding="utf-8"), tables_of(runs)), encoding="utf-8")
    if not options.no_draw:
        draw()
    return 0


def tables_of(runs: Runs) -> dict[str, Callable[[], str]]:
    """What makes each table, by its name."""
    return {name: partial(table, runs) for name, table in TABLES.items()}


def draw() -> None:
    """Draws the figures that the pages show, for light and dark ones."""
    from training.report.figures import draw_figures
    from training.report.records import study_records
    from training.report.results import check_results

    FIGURES.mkdir(exist_ok=True)
    shown_there = "".join((FOLDER / name).read_text(encoding="utf-8") for name in PAGES)
    for file in sorted(RUNS.glob("*.parquet")):
        try:
            whole = study_in(file)
        except SettingsError:
            # A study that has not ended has tables only.
            continue
        if f"({FIGURES.name}/{file.stem}_" not in shown_there:
            continue
        study = check_results(whole | {"runs": [training.result for training in trainings(file)]})
        for figure in draw_figures(study, study_records(study)):
            if f"({FIGURES.name}/{file.stem}_{figure.name}.png)" in shown_there:
                (FIGURES / f"{file.stem}_{figure.name}.png").write_bytes(figure.png)
                (FIGURES / f"{file.stem}_{figure.name}_dark.png").write_bytes(figure.dark_png)


def claims_table(runs: Runs) -> str:
    """Every claim with its verdict, and every test with its difference, intervals, p-value and verdict."""
    head = ("claim", "test", "seeds", "difference over seeds", "over seeds and texts", "p (Holm)", "verdict")
    whole, rows = outcomes(runs), []
    for claim in CLAIMS:
        of_claim = [outcome for outcome in whole if outcome.claim is claim]
        text = f"{claim.number}: {claim.text} ({claim.source}): **{verdict_of(of_claim)}**"
        for outcome in of_claim:
            rows.append((text, f"`{outcome.test}`", *_difference(outcome), outcome.verdict))
            text = ""
    return markdown(head, rows, texts=2)


def _difference(outcome: Outcome) -> tuple[str, str, str, str]:
    if outcome.difference is None:
        return "", "", "", ""
    digits = 0 if outcome.test.first.quantity == "steps" else 4
    over_texts = "" if outcome.over_texts is None else ranged(outcome.over_texts, digits)
    return str(outcome.seeds), ranged(outcome.difference, digits), over_texts, f"{outcome.decisive_p:.2g}"


def diverged_table(runs: Runs) -> str:
    """The training runs that diverged or could not be made, with the reason."""
    lines = [
        f"- `{run['scheme']}` ({study}, {run['task']}, seed {run['seed']}): {run['status']}, {run['reason']}"
        for study, rows in runs.items()
        for run in rows
        if run["status"] != "finished"
    ]
    return "\n".join(lines) or "None."


def losses_of(
    study: str, only: Callable[[str], bool] = lambda scheme: True, task: str = "causal"
) -> Callable[[Runs], str]:
    """The table of losses of a study by length, from the lowest at the trained length.

    Causal models have the loss in a sliding window beside them, and masked models the steps to a loss.
    """
    beside = "sliding" if task == "causal" else f"steps to {MASKED:.2f}"

    def table(runs: Runs) -> str:
        rows = []
        for scheme, seeds in finished(runs, study, task).items():
            if only(scheme):
                tails = [tail(seeds, length) for length in LENGTHS]
                if task == "causal":
                    other = shown(mean_of(run["by_length"]["sliding_loss"] for run in seeds.values()))
                else:
                    other = _steps_to(Measure(scheme, "steps", MASKED, study, task), runs, seeds)
                cells = (f"`{scheme}`", *map(shown, tails), other, seeds_of(runs, study, scheme, task))
                rows.append((tails[0].value, cells))
        return ranked(("scheme", *(f"{length:,}" for length in LENGTHS), beside, "seeds"), rows)

    return table


def differences_of(study: str) -> Callable[[Runs], str]:
    """The table of losses at the trained length in a study, less that of RoPE."""

    def table(runs: Runs) -> str:
        trained = finished(runs, study)
        rope, rows = tail_by_seed(trained.get("rope", {}), LENGTH), []
        for scheme, seeds in trained.items():
            both = over_texts(Measure(scheme, study=study), Measure("rope", study=study), runs)
            if scheme not in ("rope", *SCALINGS) and both is not None:
                over_seeds, common = mean_paired(tail_by_seed(seeds, LENGTH), rope), len(seeds.keys() & rope.keys())
                rows.append((over_seeds.value, (f"`{scheme}`", ranged(over_seeds), ranged(both), str(common))))
        return ranked(("scheme", "over seeds", "over seeds and texts", "seeds"), rows)

    return table


def window_differences(runs: Runs) -> str:
    """Losses with windows less those of RoPE in all layers, by length, and how far the loss of each scheme rises."""
    trained = finished(runs, "reference_windows")
    by_length = {scheme: [tail_by_seed(seeds, length) for length in LENGTHS] for scheme, seeds in trained.items()}
    native, rows = by_length.get("native", [{} for _ in LENGTHS]), []
    for scheme, losses in by_length.items():
        above = ["" if scheme == "native" else ranged(mean_paired(*pair)) for pair in zip(losses, native, strict=True)]
        rows.append((f"`{scheme}`", *above, ranged(mean_paired(losses[-1], losses[0]))))
    head = (f"{LENGTHS[0]}, less `native`", *(f"{length:,}" for length in LENGTHS[1:]))
    return markdown(("scheme", *head, f"from {LENGTHS[0]} to {LENGTHS[-1]:,}"), rows)


def rerun_table(runs: Runs) -> str:
    """Trainings with a new seed, beside the interval in which those of the main study expect them."""
    trained, rows = finished(runs, "reference"), []
    reruns = [run for run in runs.get("reference_rerun", ()) if len(trained.get(run["scheme"], {})) > 1]
    for scheme in dict.fromkeys(run["scheme"] for run in reruns):
        for length, again in product((LENGTHS[0], LENGTHS[-1]), [run for run in reruns if run["scheme"] == scheme]):
            seed = again["seed"]
            expected = prediction(list(tail_by_seed(trained[scheme], length).values()))
            # A training that diverged has no loss, and is not inside.
            loss = tail_by_seed({seed: again}, length)[seed] if again["status"] == "finished" else float("inf")
            inside = "yes" if expected.low <= loss <= expected.high else "**no**"
            interval = f"[{expected.low:.3f}, {expected.high:.3f}]"
            seeds = str(len(trained[scheme]))
            rows.append((f"`{scheme}`", f"{length:,}", seeds, interval, str(seed), f"{loss:.3f}", inside))
    return markdown(("scheme", "tokens", "seeds", "expected", "new seed", "its loss", "inside"), rows)


def control_table(runs: Runs) -> str:
    """Trainings that were repeated with the same seed on another processor."""
    trained, rows = finished(runs, "reference"), []
    for again in runs.get("reference_control", ()):
        seed, first = again["seed"], trained.get(again["scheme"], {}).get(again["seed"])
        if first is not None and again["status"] == "finished":
            for length in (LENGTHS[0], LENGTHS[-1]):
                losses = [tail_by_seed({seed: run}, length)[seed] for run in (first, again)]
                cells = (*(f"{loss:.3f}" for loss in losses), f"{losses[1] - losses[0]:+.3f}")
                rows.append((f"`{again['scheme']}`", f"{length:,}", str(seed), *cells))
    return markdown(("scheme", "tokens", "seed", "main study", "repeated", "difference"), rows)


def speed_table(runs: Runs) -> str:
    """Steps to a loss, processor time per step, and the loss of all after the time of the fastest."""
    trained = {scheme: seeds for scheme, seeds in finished(runs, "reference").items() if scheme not in SCALINGS}
    if "none" not in trained:
        return NOT_RUN
    seconds = {scheme: np.mean([run["cpu_seconds"] for run in seeds.values()]) for scheme, seeds in trained.items()}
    budget, rows = min(seconds.values()), []
    for scheme, seeds in trained.items():
        equal = mean_of(_loss_after(run, budget) for run in seeds.values())
        row = (
            f"`{scheme}`",
            _steps_to(Measure(scheme, "steps", REACHED), runs, seeds),
            f"{seconds[scheme] / seconds['none']:.2f}",
            shown(mean_of(run["curve"]["validation_loss"][-1] for run in seeds.values())),
            shown(equal),
        )
        rows.append((equal.value, row))
    head = ("scheme", f"steps to {REACHED:.2f}", "time (none = 1)", "loss after all steps", "loss after equal time")
    return ranked(head, rows)


def _steps_to(measure: Measure, runs: Runs, seeds: Mapping[int, Run]) -> str:
    """The steps to a loss of the training runs that finished, if all of them have reached it."""
    if never_reached(runs, measure):
        return "not reached"
    return shown(mean_of(steps for seed, steps in measure.values(runs).items() if seed in seeds), 0)


def _loss_after(run: Run, seconds: float) -> float:
    """The validation loss of a run after so many processor seconds, between two points of its curve."""
    steps = run["curve"]["step"]
    return float(np.interp(steps[-1] * seconds / run["cpu_seconds"], steps, run["curve"]["validation_loss"]))


def answers_of(study: str) -> Callable[[Runs], str]:
    """The table of the shares of right answers of a study, by task and length."""

    def table(runs: Runs) -> str:
        tasks = dict.fromkeys(run["task"] for run in runs.get(study, ()))
        return "\n\n".join(_answers(runs, study, task) for task in tasks) or NOT_RUN

    return table


def _answers(runs: Runs, study: str, task: str) -> str:
    trained = finished(runs, study, task)
    if not trained:
        return f"**{task}**: no training has finished."
    lengths = next(iter(next(iter(trained.values())).values()))["exact_match"]["lengths"]
    rows = [
        (
            f"`{scheme}`",
            *(share_of_answers(seeds.values(), length) for length in lengths),
            seeds_of(runs, study, scheme, task),
        )
        for scheme, seeds in trained.items()
    ]
    return f"**{task}**\n\n{markdown(('scheme', *map(str, lengths), 'seeds'), rows)}"


TABLES: dict[str, Callable[[Runs], str]] = {
    "claims": claims_table,
    "diverged": diverged_table,
    "rates": rates_table,
    "losses": losses_of("reference", lambda scheme: scheme not in SCALINGS),
    "scalings": losses_of("reference", lambda scheme: scheme in ("rope", *SCALINGS)),
    "repeats": repeats_table,
    "source_losses": losses_of("reference_source"),
    "source_differences": differences_of("reference_source"),
    "differences": differences_of("reference"),
    "rerun": rerun_table,
    "control": control_table,
    "other_rate": other_rate_table,
    "grid": grid_table,
    "speed": speed_table,
    "frequencies": frequencies_table,
    "moved": moved_table,
    "precision": precision_table,
    "tasks": answers_of("reference_tasks"),
    "encoder_decoders": answers_of("reference_marian"),
    "masked": losses_of("reference_masked", task="masked"),
    "quoted": quoted_table,
    "heal": heal_table,
    "heal_pretrained": pretrained_heal_table,
    "windows": losses_of("reference_windows"),
    "window_differences": window_differences,
    "leaderboard": leaderboard_of("reference", "trained length", "minus RoPE", "4 times", "8 times", "time", "seeds"),
    "leaderboard_tasks": leaderboard_of("reference", "copy", "retrieval", "healed", "cache", "parameters"),
    "one_seed": leaderboard_of(
        "reference_catalogue", "trained length", "minus RoPE", "4 times", "8 times", "time", "cache", "parameters"
    ),
}


if __name__ == "__main__":
    sys.exit(main())
