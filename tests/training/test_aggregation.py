"""Means, intervals and refusals of a study's results."""

from __future__ import annotations

import copy
import math

import pytest
from scipy import stats

from tests.training.study_results import finished, published_comparison, study, three_seeds, unfinished
from training.study.aggregation import Estimate, aggregate, estimate, of_task
from training.study.schema import ResultsError, check_results


def found(results, task, scheme):
    return next(item for item in aggregate(results) if (item.task, item.scheme) == (task, scheme))


def test_the_interval_is_that_of_students_t():
    # By hand: mean 2, standard deviation 1, n 3, t(0.975, 2) = 4.302653.
    assert estimate([1.0, 2.0, 3.0]) == Estimate(2.0, pytest.approx(4.302653 / math.sqrt(3), rel=1e-6), 3)
    values = [1.31, 1.35, 1.29, 1.4, 1.33]
    low, high = stats.t.interval(0.95, len(values) - 1, loc=sum(values) / 5, scale=stats.sem(values))
    own = estimate(values)
    assert own.mean is not None
    assert own.half_width is not None
    assert (own.mean - own.half_width, own.mean + own.half_width) == pytest.approx((low, high), rel=1e-12)


def test_one_seed_has_no_interval_and_none_has_no_mean():
    assert estimate([2.5]) == Estimate(2.5, None, 1)
    assert estimate([2.5, None]) == Estimate(2.5, None, 1)
    assert estimate([None, None]) == Estimate(None, None, 0)
    assert estimate([]) == Estimate(None, None, 0)


def test_every_figure_is_aggregated_over_the_seeds_that_finished():
    item = found(three_seeds(), "causal", "alibi")
    assert item.seeds == (0, 1)
    assert [(run.seed, run.status) for run in item.unfinished] == [(2, "diverged")]
    assert [loss.mean for loss in item.loss] == [2.5625, 2.8125, 3.0625]
    assert {loss.n for loss in item.loss} == {2}
    assert item.sliding_loss is not None
    assert item.sliding_loss.mean == 2.5625
    assert [point.mean for point in item.validation_loss] == [3.1, pytest.approx(2.6625)]
    assert item.dog_layers[1].mean == 0.1875
    assert item.dog_told_apart == 2
    assert item.accuracy == ()


def test_differences_and_prices_are_paired_by_seed():
    results = three_seeds()
    rope = found(results, "causal", "rope-500k")
    # Every seed of the control has the same losses, so the paired difference is exact where the means are spread.
    assert [(d.mean, d.half_width, d.n) for d in rope.difference] == [(0.0, 0.0, 3)] * 3
    assert rope.control == "native"
    assert rope.price_reference == "none"
    assert rope.price is not None
    assert rope.clock == "processor"
    assert rope.price.mean == pytest.approx(1.0)
    results["machine"]["gpu"] = "a device"
    rope = found(results, "causal", "rope-500k")
    assert (rope.clock, rope.price.mean) == ("wall", pytest.approx((6 + 7 + 8) / 3 / 4))
    native = found(results, "causal", "native")
    assert (native.control, native.difference) == (None, ())
    assert found(results, "copy", "rope-500k").price_reference == "native"


def test_time_is_by_the_steps_of_the_run_and_not_of_its_task():
    longer = finished("causal", "rope", seconds=8.0)
    longer["curve"] = {"step": [20, 40], "train_loss": [3.0, 2.5], "validation_loss": [3.1, 2.6]}
    read = finished("causal", "alibi", seconds=0.0, cpu_seconds=0.0) | {"from": "rope"}
    read["curve"] = {"step": [0], "train_loss": [], "validation_loss": [2.6]}
    results = study([finished("causal", "none", seconds=4.0), longer, read])
    results["machine"]["gpu"] = "a device"
    price = found(results, "causal", "rope").price
    assert price is not None
    assert price.mean == 1.0
    longer["training"] = {"train_length": 64}
    assert found(results, "causal", "rope").price is None
    zero_shot = found(results, "causal", "alibi")
    assert (zero_shot.price, zero_shot.seconds.mean, zero_shot.start) == (None, None, "rope")


def test_a_figure_that_one_seed_lacks_counts_the_others():
    results = three_seeds()
    results["runs"][0]["by_length"]["loss"][2] = None
    item = found(results, "causal", "native")
    assert [loss.n for loss in item.loss] == [3, 3, 2]
    # The control lacks it too, so the pair is gone.
    assert [d.n for d in found(results, "causal", "none").difference] == [3, 3, 2]


def test_a_published_comparison_keeps_its_numbers():
    results = published_comparison()
    items = aggregate(results)
    assert len(of_task(items, "causal")) == 6
    run = next(run for run in results["runs"] if (run["task"], run["scheme"]) == ("masked", "rope"))
    item = found(results, "masked", "rope")
    assert [loss.mean for loss in item.loss] == run["by_length"]["loss"]
    assert all(loss.half_width is None for loss in item.loss)


@pytest.mark.parametrize("key", ["name", "settings", "command", "corpus", "tasks", "runs", "versions", "machine"])
def test_a_missing_part_is_named(key):
    results = three_seeds()
    del results[key]
    with pytest.raises(ResultsError, match=f"missing '{key}'"):
        check_results(results)


@pytest.mark.parametrize("key", ["config", "seed", "notes", "curve", "by_length", "dog", "model", "cpu_seconds"])
def test_a_missing_key_of_a_run_is_named_with_the_run(key):
    results = study([finished("causal", "rope")])
    del results["runs"][0][key]
    with pytest.raises(ResultsError, match=rf"(runs\[0\]|'rope', seed 0).*missing '{key}'"):
        check_results(results)


def broken(change):
    results = copy.deepcopy(study([finished("causal", "rope"), finished("copy", "rope")]))
    change(results)
    return results


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["runs"][0].update(status="done"), "the status 'done'; known: finished"),
        (lambda r: r["runs"][0].update(task="speech"), "'speech'.*described: causal"),
        (lambda r: r["tasks"]["causal"].update(kind="speech"), "the kind 'speech'"),
        (lambda r: r["tasks"]["causal"].update(objective="both"), "the objective 'both'"),
        (lambda r: r["tasks"]["copy"].pop("samples"), "'copy'.*missing 'samples'"),
        (lambda r: r["runs"][0].update(config="rope"), "the config 'rope'"),
        (lambda r: r["runs"][0]["by_length"].update(lengths=[16, 32]), r"measured at \[16, 32\]"),
        (lambda r: r["runs"][0]["by_length"].update(loss=[1.0]), "lists of different lengths"),
        (lambda r: r["runs"][0]["by_length"].update(sliding_loss=[1.0]), "sliding_loss"),
        (lambda r: r["runs"][0]["by_length"].update(position_edges=[0, 64]), "3 losses by position between 2 edges"),
        (lambda r: r["runs"][0]["curve"].update(step=[], train_loss=[], validation_loss=[]), "no point"),
        (lambda r: r["runs"][0]["dog"].pop("probe"), "missing 'probe'"),
        (lambda r: r["runs"][1]["exact_match"].pop("accuracy"), "missing 'accuracy'"),
        (lambda r: r["runs"].append(r["runs"][0]), "second run of task 'causal', scheme 'rope', seed 0"),
        (lambda r: r["corpus"].pop("digest"), "missing 'digest'"),
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
        aggregate(study([finished("causal", "rope", 0), finished("causal", "rope", 1, **change)]))
