"""The tables of docs/study are those of its raw runs."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest

from docs.study import leaderboard, make_pages as study, measured
from docs.study.claims import CLAIMS, read_runs

ROOT = Path(__file__).resolve().parents[2]


def of_run(scheme: str, seed: int, losses: float | list[float], **figures: object) -> dict[str, object]:
    """A finished run with one loss at every length, or with one for each."""
    each = losses if isinstance(losses, list) else [losses] * len(study.LENGTHS)
    reading = {"lengths": list(study.LENGTHS), "loss": each, "tail_loss": each}
    reading["window_tail_loss"] = [[loss, loss] for loss in each]
    return {"task": "causal", "scheme": scheme, "seed": seed, "status": "finished", "by_length": reading} | figures


def rows_of(table: str, runs: dict[str, list[dict[str, object]]]) -> list[list[str]]:
    """The cells of each row of a table, without its head."""
    return [line.split(" | ") for line in study.TABLES[table](runs).splitlines()[2:]]


@pytest.mark.long
@pytest.mark.parametrize("name", ["results.md", "leaderboard.md"])
def test_the_tables_of_a_page_are_up_to_date(name: str) -> None:
    assert name in study.PAGES
    page = (study.FOLDER / name).read_text(encoding="utf-8")
    assert study.filled(page, study.tables_of(read_runs(study.RUNS))) == page, (
        "Run: python docs/study/make_pages.py --no-draw"
    )


def test_every_table_stands_on_a_page() -> None:
    pages = "".join((study.FOLDER / name).read_text(encoding="utf-8") for name in study.PAGES)
    assert sorted(re.findall(r"<!-- table: (\w+) -->", pages)) == sorted(study.TABLES)


def test_without_runs_every_table_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    for name, table in study.TABLES.items():
        if name == "diverged":
            assert table({}) == "None."
        elif name == "claims":
            assert table({}).count("not run") == len(CLAIMS) + sum(len(claim.tests) for claim in CLAIMS)
        else:
            assert table({}) == study.NOT_RUN


def test_tables_rank_schemes_and_give_their_intervals() -> None:
    def run(scheme: str, seed: int, loss: float) -> dict[str, object]:
        found = of_run(
            scheme,
            seed,
            [loss, loss, loss, loss + 1],
            curve={"step": [50, 100], "validation_loss": [2.0, loss]},
            cpu_seconds=10.0 * (1 + (scheme == "none")),
            processor="this one",
            parameters=9,
        )
        return found | {"by_length": found["by_length"] | {"sliding_loss": loss}}

    runs = {
        "reference": [
            run(scheme, seed, loss + seed / 10) for scheme, loss in (("none", 1.8), ("rope", 1.4)) for seed in (0, 1)
        ]
    }
    rows = rows_of("losses", runs)
    assert [row[0] for row in rows] == ["| `rope`", "| `none`"]
    # Student's interval of two numbers 0.1 apart is 12.706 * 0.05.
    assert rows[0][1] == "1.450 ± 0.635"
    assert "+0.400 [+0.400, +0.400]" in study.TABLES["differences"](runs)
    speed = {row[0]: row for row in rows_of("speed", runs)}
    assert speed["| `none`"][1] == "not reached"
    assert speed["| `rope`"][1:3] == ["78 ± 32", "0.50"]
    # Half of the steps of `none` fit the time of `rope`.
    assert speed["| `none`"][4].startswith("2.000")


def test_a_new_seed_is_compared_with_what_the_others_expect() -> None:
    def run(seed: int, loss: float) -> dict[str, object]:
        return of_run("none", seed, [loss, 2.0, 2.0, loss + 1])

    # Student's quantile of one degree of freedom, 12.706, times 0.0141 * sqrt(1.5): 0.220 around 1.51.
    runs = {"reference": [run(0, 1.50), run(1, 1.52)], "reference_rerun": [run(6, 1.72), run(7, 1.74)]}
    rows = rows_of("rerun", runs)
    assert [row[1] for row in rows] == ["128", "128", "1,024", "1,024"]
    assert [row[3] for row in rows[::2]] == ["[1.290, 1.730]", "[2.290, 2.730]"]
    assert [row[-1] for row in rows] == ["yes |", "**no** |"] * 2


def test_a_repeated_training_is_compared_with_the_first_one() -> None:
    def run(seed: int, loss: float) -> dict[str, object]:
        return of_run("rope", seed, [loss, 9.0, 9.0, loss + 1])

    runs = {"reference": [run(0, 1.20), run(1, 1.30)], "reference_control": [run(0, 1.21)]}
    rows = study.TABLES["control"](runs).splitlines()[2:]
    assert rows == [
        "| `rope` | 128 | 0 | 1.200 | 1.210 | +0.010 |", "| `rope` | 1,024 | 0 | 2.200 | 2.210 | +0.010 |"
    ]  # fmt: skip


def test_each_scheme_has_the_better_of_two_rates() -> None:
    runs = {
        "reference": [
            of_run(scheme, 0, loss, processor="slow")
            for scheme, loss in (("rope", 1.22), ("t5", 1.23), ("alibi", 1.28))
        ],
        "reference_half_rate": [
            of_run(scheme, 0, loss, processor="fast")
            for scheme, loss in (("rope", 1.20), ("t5", 1.29), ("alibi", 1.26))
        ],
    }
    assert study.TABLES["other_rate"](runs).splitlines()[2:] == [
        "| `rope` | 1.220 | 1.200 | -0.020 |  | 1 |",
        "| `t5` | 1.230 | 1.290 | +0.060 | +0.030 (two processors) | 1 |",
        "| `alibi` | 1.280 | 1.260 | -0.020 | +0.060 | 1 |",
    ]


@pytest.mark.parametrize(("processor", "above"), [("slow", -0.03), ("fast", -0.01), ("another", None)])
def test_the_catalogue_is_compared_with_the_better_rope_of_its_processor(processor: str, above: float | None) -> None:
    runs = {
        "reference": [of_run("rope", 0, 1.22, processor="slow")],
        "reference_control": [of_run("rope", 0, 1.21, processor="fast")],
        "reference_half_rate": [of_run("rope", 0, 1.20, processor="fast")],
    }
    found = leaderboard._above_rope(runs, "reference_catalogue", {0: of_run("cope", 0, 1.19, processor=processor)})
    assert found.value == pytest.approx(math.nan if above is None else above, nan_ok=True)


def test_windows_are_compared_with_rope_in_all_layers_seed_by_seed() -> None:
    runs = [of_run("native", seed, [1.0 + seed, 2.0 + seed, 3.0 + seed, 4.0 + seed]) for seed in (0, 1, 2)]
    runs += [of_run("local_global", seed, [1.1 + seed, 1.1 + seed, 1.2 + seed, 1.3 + seed]) for seed in (0, 1)]
    rows = [line.split(" | ") for line in study.TABLES["window_differences"]({"reference_windows": runs}).splitlines()]
    assert rows[2] == ["| `native`", "", "", "", "", "+3.000 [+3.000, +3.000] |"]
    # The seed that only RoPE has is left out.
    expected = ["+0.100", "-0.900", "-1.800", "-2.700", "+0.200"]
    assert [cell.split(" [")[0] for cell in rows[3][1:]] == expected


def test_repeats_say_how_many_seeds_each_study_has() -> None:
    def run(scheme: str, seed: int, loss: float) -> dict[str, object]:
        return of_run(scheme, seed, loss, curve={"step": [50, 100], "validation_loss": [2.0, loss]})

    losses = {"kerple": 1.2, "alibi": 1.3}
    main = [run(scheme, seed, loss) for scheme, loss in losses.items() for seed in range(3)]
    table = study.TABLES["repeats"]({"reference": main, "reference_source": [one for one in main if one["seed"] < 2]})
    head, _, row = table.splitlines()[:3]
    assert head == "| claim | test | main study, 3 seeds | with 0.002, 0 seeds | source code, 2 seeds |"
    assert row == "| 1a | `kerple < alibi` | -0.100 [-0.100, -0.100] |  | -0.100 [-0.100, -0.100] |"


@pytest.mark.parametrize("place", range(3))
def test_the_examples_of_the_raw_runs_give_the_numbers_beside_them(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "study" / "results.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(ROOT)
    scope: dict[str, object] = {}
    exec(blocks[0], scope)  # It imports pandas for the others.
    exec(blocks[place], scope)
    shown = re.findall(r"^(.+?)  # (\[.*?\]|[\d.]+)", blocks[place], flags=re.MULTILINE)
    assert shown
    for expression, number in shown:
        assert eval(expression, scope) == pytest.approx(ast.literal_eval(number), abs=5e-4)


def test_times_are_relative_to_the_same_processor() -> None:
    def run(scheme: str, seconds: float, processor: str) -> dict[str, object]:
        return of_run(scheme, 0, 1.0, cpu_seconds=seconds, processor=processor)

    slow, fast = run("none", 10.0, "slow"), run("none", 4.0, "fast")
    runs = {"reference": [slow], "reference_control": [fast]}
    assert leaderboard._relative_time(runs, {0: run("cope", 8.0, "fast")}) == "2.00"
    assert leaderboard._relative_time(runs, {0: run("cope", 8.0, "slow")}) == "0.80"
    assert leaderboard._relative_time(runs, {0: run("cope", 8.0, "another")}) == ""


def test_what_is_quoted_is_compared_seed_by_seed() -> None:
    def run(scheme: str, seed: int, right: float) -> dict[str, object]:
        answers = {"lengths": [5, 10], "accuracy": [1.0, right]}
        named = {"task": "reverse", "scheme": scheme, "seed": seed, "status": "finished"}
        return named | {"exact_match": answers}

    shares = {("native", 0): 0.5, ("native", 1): 0.7, ("rope", 0): 0.6, ("rope", 1): 0.8, ("rope", 2): 0.1}
    runs = {"reference_marian": [run(scheme, seed, right) for (scheme, seed), right in shares.items()]}
    (row,) = study.TABLES["quoted"](runs).splitlines()[2:]
    assert "27.5 and 27.3" in row
    # Student's interval of 0.6 and 0.8 is 12.706 * 0.1, and the seed that only one of them has is left out.
    assert row.endswith("| `rope` and `native` | encoder-decoder, reverse, right answers | 0.70 ± 1.27 | 0.60 ± 1.27 | "
                        "+0.10 [+0.10, +0.10] | 2 |")  # fmt: skip


def test_steps_to_a_loss_that_is_never_reached_are_a_bound() -> None:
    def run(scheme: str, seed: int, last: float) -> dict[str, object]:
        curve = {"step": [50, 100], "validation_loss": [3.0, last]}
        reading = {"lengths": list(study.LENGTHS), "tail_loss": [last] * 4, "window_tail_loss": [[last, None]] * 4}
        named = {"task": "masked", "scheme": scheme, "seed": seed, "status": "finished"}
        return named | {"by_length": reading, "curve": curve}

    runs = {
        "reference_masked": [
            run(scheme, seed, last) for scheme, last in (("rope", 2.0), ("native", 2.9)) for seed in (0, 1)
        ]
    }
    (row,) = study.TABLES["quoted"](runs).splitlines()[2:]
    assert row.endswith("| masked, steps to 2.50 | 75 | not reached | below -25 | 2 |")


def test_swaps_are_compared_with_the_control_at_the_better_rate_of_each() -> None:
    def run(label: str, seed: int, loss: float) -> dict[str, object]:
        return of_run(label, seed, loss, before={"lengths": list(study.LENGTHS), "loss": [3.0] * 4})

    losses = {"rope-slow": 1.2, "rope-fast": 1.3, "none-slow": 2.0, "none-fast": 1.7}
    runs = {"reference_heal": [run(label, seed, loss + seed) for label, loss in losses.items() for seed in (0, 1)]}
    rows = rows_of("heal", runs)
    assert [row[0] for row in rows] == ["| `rope`", "| `none`"]
    assert rows[1][1] == "3.000"
    assert rows[1][4] == "+0.500 [+0.500, +0.500]"


def test_swaps_of_a_pretrained_model_are_compared_with_the_one_that_was_not_swapped() -> None:
    def run(scheme: str, seed: int, loss: float) -> dict[str, object]:
        reading = {"lengths": [256, 1024], "loss": [loss, loss + 1], "window_tail_loss": [[loss - 1], [loss]]}
        figures = {"by_length": reading, "before": reading | {"loss": [5.0, 6.0]}}
        return {"task": "causal", "scheme": scheme, "seed": seed, "status": "finished", **figures}

    losses = {"alibi": 4.5, "native": 3.2, "kerple": 4.0}
    runs = [run(scheme, seed, loss + seed) for scheme, loss in losses.items() for seed in (0, 1)]
    table = study.TABLES["heal_pretrained"]({"reference_heal_smollm2": [*runs, run("none", 2, 4.9)]})
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| `native`", "| `kerple`", "| `none`", "| `alibi`"]
    # Student's interval of two numbers 1 apart is 12.706 * 0.5; the differences of the seeds are equal.
    kerple = ["5.000", "4.500 ± 6.353", "+0.800 [+0.800, +0.800]", "3.500 ± 6.353", "4.500 ± 6.353", "2 |"]
    assert rows[1][1:] == kerple
    assert rows[2][1:4] == ["5.000", "4.900", ""]


def test_swaps_that_diverged_or_were_not_run_leave_the_rest() -> None:
    def run(label: str, seed: int, loss: float, status: str = "finished") -> dict[str, object]:
        found = of_run(label, seed, loss, reason="", status=status)
        return found | {"before": found["by_length"]}

    runs = [run("rope-slow", seed, 1.2) for seed in (0, 1)] + [run("alibi-slow", 0, 2.0)]
    runs += [run("alibi-fast", seed, 9.0, "diverged") for seed in (0, 1)] + [run("none-fast", 3, 2.5)]
    rows = {row[0]: row for row in rows_of("heal", {"reference_heal": runs})}
    # One seed has no interval, and no seed of the control nothing to compare with.
    assert rows["| `alibi`"][2:5] == ["2.000", "", "+0.800"]
    assert rows["| `none`"][2:5] == ["", "2.500", ""]


def test_a_new_seed_that_diverged_is_not_inside() -> None:
    def run(seed: int, status: str = "finished") -> dict[str, object]:
        return of_run("none", seed, 1.5 + seed / 100, status=status)

    runs = {"reference": [run(0), run(1), run(2, "diverged")], "reference_rerun": [run(6, "diverged")]}
    rows = rows_of("rerun", runs)
    assert [(row[2], row[-1]) for row in rows] == [("2", "**no** |")] * 2


@pytest.mark.parametrize(("name", "numbers"), [("rope", 256), ("forget_gate", 256 + 16), (None, 256)])
def test_cached_numbers_count_keys_values_and_features(name: str | None, numbers: int) -> None:
    # 4 heads of width 32; a forget gate adds 16 bytes to the key of each head, which are four numbers.
    assert leaderboard.cached_numbers({} if name is None else {"scheme": name}) == numbers
