"""Reports of a study's results: means and intervals, tables, figures, the page."""

from __future__ import annotations

import copy
import json
import random
import re
from unittest import mock

import pytest

from docs.study.outputs import main
from tests.hostile.kinds import json_bytes
from tests.hostile.mutations import change_of_json
from tests.training.run_cases import REPOSITORY, refused
from tests.training.study_results import LENGTHS, finished, row, study, three_seeds, unfinished
from training.files import read_json
from training.report import outputs
from training.report.figures import draw_figures
from training.report.outputs import write_outputs
from training.report.records import study_records
from training.report.results import ResultsError, check_results
from training.report.summary import study_summary

PUBLISHED = REPOSITORY / "docs" / "results"


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


def tables(results):
    return outputs.format_tables(check_results(results), records(results))


def figures(results):
    """Their names, with title and axis; nothing is rendered, which takes a second for each pair."""
    texts = mock.Mock(side_effect=lambda figure, **_: f"{figure.get_suptitle()}\n{figure.axes[0].get_ylabel()}")
    with mock.patch("training.report.figures.png_of", texts):
        return {figure.name: figure.png for figure in draw_figures(check_results(results), records(results))}


def test_every_figure_is_aggregated_over_the_seeds_that_finished_and_differences_are_paired():
    results = three_seeds()
    assert numbers(results, "causal", "alibi", "seeds")[0][0] == 2
    assert [(mean, n) for mean, _, n in numbers(results, "causal", "alibi", "loss")] == [
        (2.5625, 2), (2.8125, 2), (3.0625, 2)
    ]  # fmt: skip
    for quantity, expected in (
        ("sliding_loss", [2.5625]), ("validation_loss", [3.1, pytest.approx(2.6625)]), ("dog_distance", [0.0, 0.1875]),
        ("accuracy", []),
    ):  # fmt: skip
        assert means(results, "causal", "alibi", quantity) == expected
    # Every seed of the control has the same losses, so the paired difference is exact where the means are spread.
    assert numbers(results, "causal", "rope-500k", "difference") == [(0.0, 0.0, 3)] * 3
    assert records(results)["causal"].settings["control"] == "native"
    assert means(results, "causal", "native", "difference") == []
    assert "seeds: the others have no number" not in tables(results)
    results["runs"][0]["by_length"]["loss"][2] = None
    assert [n for _, _, n in numbers(results, "causal", "native", "loss")] == [3, 3, 2]
    # The control lacks it too, so the pair is gone.
    assert [n for _, _, n in numbers(results, "causal", "none", "difference")] == [3, 3, 2]
    assert "Of 2 of 3 seeds: the others have no number." in tables(results)


@pytest.mark.parametrize(
    "name",
    [
        "compare", "findings", "findings_seed7", "healing/minilm", "healing/smollm2", "healing/self_distill",
        "healing/tiny_bert", "images",
        "images_rates",
    ],
)  # fmt: skip
def test_the_published_tables_are_those_of_the_published_results(name):
    folder = PUBLISHED / name
    assert tables(read_json(folder / "results.json")) == (folder / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (lambda r, key=key: r.pop(key), f"results: {key} is missing; expected a value")
            for key in ("name", "settings", "command", "corpus", "tasks", "runs", "versions", "machine")
        ),
        (lambda r: r["runs"][0].update(status="done"), "results: runs.0.status is 'done'; expected 'finished'"),
        (lambda r: r["runs"][0].update(task="speech"), "'speech'.*expected one of the tasks causal"),
        (lambda r: r["tasks"]["causal"].update(kind="speech"), r"tasks\.causal\.kind"),
        (lambda r: r["runs"][0].update(config="rope"), "dictionary"),
        (lambda r: r["runs"][0].pop("curve"), "has no curve"),
        (lambda r: r["runs"][0].pop("by_length"), "runs.0: it is finished, but has no lengths"),
        (lambda r: r["runs"][1]["exact_match"].pop("accuracy"), "seed 0 is finished; expected its 'accuracy'"),
        (lambda r: r["runs"][0]["by_length"].update(lengths=[16, 32, 48]), r"measured at \[16, 32, 48\]"),
        (lambda r: r["runs"][0]["by_length"].update(loss=[1.0]), "runs.0: loss has 1 numbers; expected 3"),
        (lambda r: r["runs"][0]["by_length"].update(position_edges=[0, 64]), "position_loss has 3 numbers; expected 1"),
        (lambda r: r["runs"][0]["curve"].update(validation_loss=[1.0]), "validation_loss has 1 numbers; expected 2"),
        (lambda r: r["runs"][0]["by_length"]["loss"].__setitem__(1, "x"), r"by_length.loss.1 is 'x'; expected"),
        (lambda r: r["runs"][0]["config"].update(theta="x"), "runs.0: RopeConfig.theta is 'x'; expected"),
        (lambda r: r["corpus"].pop("source"), "corpus.source is missing"),
        (lambda r: r["runs"].append(r["runs"][0]), "'causal', scheme 'rope', seed 0 is listed twice"),
    ],
)
def test_results_that_would_be_reported_wrongly_are_refused(change, message):
    results = copy.deepcopy(study([finished("causal", "rope"), finished("copy", "rope")]))
    change(results)
    with pytest.raises(ResultsError, match=message):
        records(results)


def test_whatever_is_edited_is_reported_or_refused_with_file_and_reason(tmp_path, capsys):
    runs = [
        finished("causal", "native", before={"lengths": LENGTHS, "loss": [1.0, 2.0, 3.0]}, model="models/x"),
        finished("copy", "rope", swap={"fits": [{"residual": 0.1}]}), unfinished("masked", "t5", 0, "failed", "x"),
    ]  # fmt: skip
    results, rng, outcomes = study(runs), random.Random(0), []
    with mock.patch("training.report.outputs.draw_figures", return_value=[]):
        for _ in range(60):
            change = change_of_json(results, [(name,) for name in ("runs", "tasks", "corpus", "machine")], rng)
            (tmp_path / "results.json").write_bytes(json_bytes(change.applied(results)))
            outcomes.append(main([str(tmp_path)]))
            said = capsys.readouterr().err
            assert not outcomes[-1] or re.search(r"results\.json(: .*expected| cannot be read)", said), (change, said)
    assert 10 <= sum(map(bool, outcomes)) < 60


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"config": {"scheme": "rope", "theta": 5.0}}, "config"),
        ({"parameters": 99}, "parameters"),
        ({"from": "native"}, "start"),
        ({"training": {"max_steps": 3}}, "training"),
        ({"curve": {"step": [5], "train_loss": [1.0], "validation_loss": [1.0]}}, "steps"),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(change, key):
    with pytest.raises(ResultsError, match=f"differ in {key}"):
        records(study([finished("causal", "rope", 0), finished("causal", "rope", 1, **change)]))


def test_means_stand_with_their_intervals_and_notes_say_what_a_reader_has_to_know():
    text = tables(three_seeds())
    _, _, causal, masked, copied = re.split(r"^## ", text, flags=re.M)
    assert row(causal, "alibi")[:4] == ["alibi", "2 of 3", "2.562 ± 0.794", "2.812 ± 0.794"]
    assert row(causal, "t5")[:3] == ["t5", "0 of 3", "-"]
    assert row(masked, "rope")[:3] == ["rope", "1", "2.500"]
    assert row(copied, "rope-500k")[1:6] == ["3", "100 ± 0", "100 ± 0", "38 ± 31", "0 ± 0"]
    assert text.index("What was seen") < text.index("## causal")
    for line in (
        "`rope-500k`: `rope(theta=500000)`.",
        "`native`: the unpatched model.",
        "`rope-500k`: Careful.",
        "`alibi`: seed 2 diverged: The loss became NaN at step 7.",
        "`t5`: seed 0, 1, 2 unsupported: It <cannot> be.",
        "`rope`: dog test: No dog in this vocabulary.",
        "knows how often each token occurs, and nothing about its context, would have a loss of 3.125 nats per token",
        "python training/compare.py training/studies/tiny.yaml",
        "24 of 28 training runs finished.",
        "minutes of processor time, on",
    ):
        assert line in text


def test_the_page_needs_nothing_beside_it_has_everything_and_escapes_it(tmp_path):
    with mock.patch("training.report.figures.png_of", return_value=b"a picture"):
        write_outputs(three_seeds(), tmp_path)
    page = (tmp_path / "report.html").read_text()
    sources = re.findall(r'<img src="([^"]*)"', page)
    assert sources
    assert len(re.findall(r'<source media="\(prefers-color-scheme: dark\)" srcset="data:image', page)) == len(sources)
    assert page.index("What was seen") < page.index("<img") < page.index("studies/tiny.yaml")
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"<script|<link|url\(|@import|https?://", page)
    assert "default-src 'none'" in page
    for part in ("studies/tiny.yaml", "learning_rate", "became NaN at step 7", "24 of 28 runs", "11537469", "5.23.0"):
        assert part in page
    assert "It &lt;cannot&gt; be." in page
    assert "<cannot>" not in page


def test_the_files_of_a_study(tmp_path):
    runs = [
        finished("copy", "native", model="models/copy-native-seed0"),
        finished("copy", "rope", model="models/absent"),
    ]
    results = study(runs)
    (tmp_path / "models" / "copy-native-seed0").mkdir(parents=True)
    written = write_outputs(results, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "results.json", "table.md", "report.html", "models/copy-native-seed0/README.md", "plots/copy_loss_curves.png",
        "plots/copy_exact_match.png", "plots/copy_loss_curves_dark.png", "plots/copy_exact_match_dark.png",
    ]  # fmt: skip
    assert read_json(tmp_path / "results.json") == results
    assert not list(tmp_path.rglob("*.partial"))
    before = {path: path.read_bytes() for path in written}
    assert main([str(tmp_path)]) == 0
    assert {path: path.read_bytes() for path in written} == before


def test_nothing_finished_is_still_a_report(tmp_path):
    results = study([unfinished("causal", "t5", 0, "failed", "The disk is full.")], corpus=None)
    assert [path.name for path in write_outputs(results, tmp_path)] == ["results.json", "table.md", "report.html"]
    assert "The disk is full." in (tmp_path / "report.html").read_text()


def test_refused_results_and_a_kill_leave_earlier_files_alone(tmp_path, capsys):
    (tmp_path / "results.json").write_text('{"name": "earlier"}\n')
    with pytest.raises(ResultsError, match="status"):
        write_outputs(study([finished("causal", "rope", status="done")]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    with mock.patch("pathlib.Path.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        write_outputs(study([unfinished("causal", "t5", 0, "failed", "The disk is full.")], corpus=None), tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == {"name": "earlier"}
    assert f"{tmp_path / 'results.json'}: settings is missing" in refused(capsys, main, [str(tmp_path)])
    assert "no results.json" in refused(capsys, main, [str(tmp_path / "nowhere")])


def seen(results):
    return {name: " ".join(lines) for name, lines in study_summary(check_results(results), records(results)).items()}


def test_only_schemes_that_were_trained_alike_are_ranked():
    # On another length, or going on from another scheme.
    apart = [finished("causal", "rope", training={"train_length": 8}), finished("causal", "alibi") | {"from": "rope"}]
    assert "the lowest loss was" not in seen(study(apart))["causal"]
    others = study([finished("causal", "native", 0), finished("causal", "none", 1)])
    assert "They have no seed in common to compare." in seen(others)["causal"]
    nothing = study([unfinished("causal", "t5", 0, "failed", "The disk is full.")])
    assert seen(nothing)["causal"].startswith("**causal**")
    short_only = study([finished("causal", name) for name in ("rope", "alibi")])
    for run in short_only["runs"]:
        run["by_length"]["loss"][1:] = [None, None]
    assert "times as long" not in seen(short_only)["causal"]


def test_the_dogs_of_a_causal_model_are_judged_without_its_mask():
    dog = {"dog": {"layers": [0.0, 0.5], "probe": 0.0}}
    told = study([finished(task, "rope") | dog for task in ("causal", "masked", "copy")])
    told["tasks"]["copy"] |= {"causal": False, "model": "MarianMTModel"}  # its encoder reads the two dogs
    text = seen(told)
    assert "After one random attention layer without a causal mask, `rope` cannot tell" in text["causal"]
    for task in ("masked", "copy"):
        assert "every scheme tells the two dogs apart." in text[task]


def test_a_study_gets_the_figures_it_has_data_for():
    kinds = ("loss_curves", "loss_by_length", "tail_loss_by_length", "loss_by_position", "dog_distance")
    assert list(figures(three_seeds())) == [
        *(f"{task}_{kind}" for task in ("causal", "masked") for kind in kinds), "copy_loss_curves", "copy_exact_match"
    ]  # fmt: skip
    assert figures(read_json(PUBLISHED / "compare/results.json"))["causal_tail_loss_by_length"].splitlines() == [
        "Loss of the last 16 tokens by length", "causal: LlamaForCausalLM",
        "loss of the last 16 tokens (nats per token)",
    ]  # fmt: skip


def test_models_that_start_from_others_have_figures_of_their_own():
    read = finished("causal", "yarn", config={"scheme": "rope"}) | {"from": "rope"}
    read["curve"] = {"step": [0], "train_loss": [], "validation_loss": [2.6]}
    names = figures(study([finished("causal", "rope"), read]))
    assert "causal_further_loss_by_length" in names
    healed = finished("causal", "alibi") | {"from": "rope"}
    assert "causal_further_loss_curves" in figures(study([finished("causal", "rope"), healed]))
