"""Means, intervals and refusals of a study's results."""

from __future__ import annotations

import copy
import math

import pytest
from scipy import stats

from tests.training.study_results import finished, published_comparison, study, three_seeds, unfinished
from training.study.records import study_records
from training.study.results import ResultsError, check_results


def records(results):
    return study_records(check_results(results))


def numbers(results, task, scheme, quantity):
    """Mean, half width of the interval and count of each record."""
    return [
        (record.value, None if record.high is None else (record.high - record.low) / 2, record.count)
        for record in records(results)[task].of(scheme, quantity)
    ]


def means(results, task, scheme, quantity):
    return [mean for mean, _, _ in numbers(results, task, scheme, quantity)]


def test_the_interval_is_that_of_students_t():
    values = [1.31, 1.35, 1.29, 1.4, 1.33]
    runs = [finished("causal", "rope", seed) for seed in range(5)]
    for run, value in zip(runs, values, strict=True):
        run["by_length"]["loss"] = [value, value, None]
    low, high = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
    first, _, none = records(study(runs))["causal"].of("rope", "loss")
    assert (first.low, first.value, first.high) == pytest.approx((low, sum(values) / 5, high), rel=1e-12)
    assert (none.value, none.low, none.count) == (None, None, 0)
    # By hand: mean 2, standard deviation 1, n 3, t(0.975, 2) = 4.302653.
    for run, value in zip(runs, (1.0, 2.0, 3.0), strict=False):
        run["by_length"]["loss"][0] = value
    assert numbers(study(runs[:3]), "causal", "rope", "loss")[0] == (
        2.0, pytest.approx(4.302653 / math.sqrt(3), rel=1e-6), 3
    )  # fmt: skip
    assert numbers(study(runs[:1]), "causal", "rope", "loss")[0] == (1.0, None, 1)


def test_every_figure_is_aggregated_over_the_seeds_that_finished():
    results = three_seeds()
    assert numbers(results, "causal", "alibi", "seeds")[0][0] == 2
    assert [(mean, n) for mean, _, n in numbers(results, "causal", "alibi", "loss")] == [
        (2.5625, 2), (2.8125, 2), (3.0625, 2)
    ]  # fmt: skip
    assert means(results, "causal", "alibi", "sliding_loss") == [2.5625]
    assert means(results, "causal", "alibi", "validation_loss") == [3.1, pytest.approx(2.6625)]
    assert means(results, "causal", "alibi", "dog_distance") == [0.0, 0.1875]
    assert means(results, "causal", "alibi", "accuracy") == []
    (note,) = records(results)["causal"].subject("alibi").notes
    assert "seed 2 diverged: The loss became NaN at step 7." in note


def test_differences_and_prices_are_paired_by_seed():
    results = three_seeds()
    # Every seed of the control has the same losses, so the paired difference is exact where the means are spread.
    assert numbers(results, "causal", "rope-500k", "difference") == [(0.0, 0.0, 3)] * 3
    settings = records(results)["causal"].settings
    assert (settings["control"], settings["price_reference"], settings["clock"]) == ("native", "none", "processor")
    assert means(results, "causal", "rope-500k", "price") == [pytest.approx(1.0)]
    results["machine"]["gpu"] = "a device"
    assert records(results)["causal"].settings["clock"] == "wall"
    assert means(results, "causal", "rope-500k", "price") == [pytest.approx((6 + 7 + 8) / 3 / 4)]
    assert means(results, "causal", "native", "difference") == []
    assert records(results)["copy"].settings["price_reference"] == "native"


def test_time_is_by_the_steps_of_the_run_and_not_of_its_task():
    longer = finished("causal", "rope", seconds=8.0)
    longer["curve"] = {"step": [20, 40], "train_loss": [3.0, 2.5], "validation_loss": [3.1, 2.6]}
    read = finished("causal", "alibi", seconds=0.0, cpu_seconds=0.0) | {"from": "rope"}
    read["curve"] = {"step": [0], "train_loss": [], "validation_loss": [2.6]}
    results = study([finished("causal", "none", seconds=4.0), longer, read])
    results["machine"]["gpu"] = "a device"
    assert means(results, "causal", "rope", "price") == [1.0]
    longer["training"] = {"train_length": 64}
    assert means(results, "causal", "rope", "price") == []
    assert means(results, "causal", "alibi", "seconds") == [None]


def test_a_figure_that_one_seed_lacks_counts_the_others():
    results = three_seeds()
    results["runs"][0]["by_length"]["loss"][2] = None
    assert [n for _, _, n in numbers(results, "causal", "native", "loss")] == [3, 3, 2]
    # The control lacks it too, so the pair is gone.
    assert [n for _, _, n in numbers(results, "causal", "none", "difference")] == [3, 3, 2]


def test_a_published_comparison_keeps_its_numbers():
    results = published_comparison()
    assert len(records(results)["causal"].subjects) == 6
    run = next(run for run in results["runs"] if (run["task"], run["scheme"]) == ("masked", "rope"))
    assert [(mean, half) for mean, half, _ in numbers(results, "masked", "rope", "loss")] == [
        (loss, None) for loss in run["by_length"]["loss"]
    ]


@pytest.mark.parametrize("key", ["name", "settings", "command", "corpus", "tasks", "runs", "versions", "machine"])
def test_a_missing_part_is_named(key):
    results = three_seeds()
    del results[key]
    with pytest.raises(ResultsError, match=f"missing '{key}'"):
        check_results(results)


@pytest.mark.parametrize("key", ["config", "seed", "notes", "curve", "by_length", "model", "cpu_seconds"])
def test_a_missing_key_of_a_run_is_named_with_the_run(key):
    results = study([finished("causal", "rope")])
    del results["runs"][0][key]
    with pytest.raises(ResultsError, match=rf"runs\[0\] \(task 'causal', scheme 'rope', seed .*missing '{key}'"):
        check_results(results)


def broken(change):
    results = copy.deepcopy(study([finished("causal", "rope"), finished("copy", "rope")]))
    change(results)
    return results


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["runs"][0].update(status="done"), "status is 'done'"),
        (lambda r: r["runs"][0].update(task="speech"), "'speech'.*described: causal"),
        (lambda r: r["tasks"]["causal"].update(kind="speech"), "kind is 'speech'"),
        (lambda r: r["tasks"]["causal"].update(objective="both"), "objective is 'both'"),
        (lambda r: r["tasks"]["copy"].pop("samples"), "copy.*missing 'samples'"),
        (lambda r: r["runs"][0].update(config="rope"), "config is 'rope'"),
        (lambda r: r["runs"][0].update(config={"theta": 1.0}), "no name of a scheme"),
        (lambda r: r["runs"][0]["by_length"].update(lengths=[16, 32, 48]), r"measured at \[16, 32, 48\]"),
        (lambda r: r["runs"][0]["by_length"].update(loss=[1.0]), "loss has 1 entries for 3 lengths"),
        (lambda r: r["runs"][0]["by_length"].update(sliding_loss=[1.0]), "sliding_loss"),
        (lambda r: r["runs"][0]["by_length"].update(position_edges=[0, 64]), "3 losses by position stand between 2"),
        (lambda r: r["runs"][0]["curve"].update(step=[], train_loss=[], validation_loss=[]), "curve.step"),
        (lambda r: r["runs"][0]["curve"].update(validation_loss=[1.0]), "a curve of 2 steps has 1 values"),
        (lambda r: r["runs"][1]["exact_match"].pop("accuracy"), "missing 'accuracy'"),
        (lambda r: r["runs"].append(r["runs"][0]), "'causal', scheme 'rope', seed 0.*is a second run"),
        (lambda r: r["corpus"].pop("digest"), "missing 'corpus.digest'"),
        (lambda r: r["runs"].append(unfinished("causal", "t5", 0, "failed", "x") | {"status": "failed"}), None),
    ],
)
def test_results_that_would_be_reported_wrongly_are_refused(change, message):
    results = broken(change)
    if message is None:
        del results["runs"][-1]["reason"]
        message = "missing 'reason'"
    with pytest.raises(ResultsError, match=message):
        check_results(results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"scheme": "rope", "theta": 5.0}}, "differ in their config"),
        ({"parameters": 99}, "differ in their number of parameters"),
        ({"from": "native"}, "differ in their start"),
        ({"training": {"max_steps": 3}}, "differ in their training settings"),
        ({"curve": {"step": [5], "train_loss": [1.0], "validation_loss": [1.0]}}, "differ in their evaluated steps"),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(change, message):
    with pytest.raises(ResultsError, match=message):
        records(study([finished("causal", "rope", 0), finished("causal", "rope", 1, **change)]))
