"""Tables, findings, the HTML page and the set of files, from results by hand and from a published comparison."""

from __future__ import annotations

import html
import itertools
import re
from html.parser import HTMLParser

import pytest

from tests.training.study_results import finished, published_comparison, study, three_seeds, unfinished
from training.files import read_json
from training.study import outputs
from training.study.figures import draw_figures as draw_study
from training.study.findings import task_findings
from training.study.outputs import main, write_outputs
from training.study.records import study_records
from training.study.report import format_report
from training.study.results import ResultsError, check_results
from training.study.wording import ranges


def format_tables(results):
    checked = check_results(results)
    return outputs.format_tables(checked, study_records(checked))


def draw_figures(results):
    checked = check_results(results)
    return draw_study(checked, study_records(checked))


def findings(results, task):
    checked = check_results(results)
    return " ".join(task_findings(checked.tasks[task], study_records(checked)[task]))


VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """The tags of a page, checked for closing in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def results():
    return three_seeds()


@pytest.fixture(scope="module")
def report(results):
    checked = check_results(results)
    records = study_records(checked)
    return format_report(checked, records, draw_study(checked, records))


def row(table: str, start: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {start} "))
    return [re.sub(r" \[\d+\]$", "", cell.strip()) for cell in line.strip("|").split("|")]


def section(text: str, title: str) -> str:
    return re.split(r"^## ", text, flags=re.M)[
        [part.startswith(title) for part in re.split(r"^## ", text, flags=re.M)].index(True)
    ]


def test_means_stand_with_their_intervals(results):
    text = format_tables(results)
    causal = section(text, "causal")
    assert row(causal, "alibi")[:4] == ["alibi", "2 of 3", "2.562 ± 0.794", "2.812 ± 0.794"]
    assert row(causal, "t5")[:3] == ["t5", "0 of 3", "-"]
    masked = section(text, "masked")
    assert row(masked, "rope")[:3] == ["rope", "1", "2.500"]
    assert row(section(text, "copy"), "rope-500k")[1:6] == ["3", "100 ± 0", "100 ± 0", "38 ± 31", "0 ± 0"]


def test_footnotes_say_what_a_reader_has_to_know(results):
    text = format_tables(results)
    for line in (
        "`rope-500k` is `rope(theta=500000)`.",
        "`native` is the unpatched model.",
        "`rope-500k`: Careful.",
        "`alibi`, seed 2 diverged: The loss became NaN at step 7.",
        "`t5`, seeds 0, 1, 2 unsupported: It <cannot> be.",
        "`rope`, dog test: No dog in this vocabulary.",
    ):
        assert line in text
    assert "token frequencies only: 3.125" in text
    assert "python training/compare.py training/studies/tiny.yaml" in text


def test_another_budget_and_another_start_are_told():
    healed = finished("causal", "alibi", training={"learning_rate": 0.1}) | {"from": "rope"}
    shorter = finished("causal", "none")
    shorter["curve"] = {"step": [10], "train_loss": [3.0], "validation_loss": [3.1]}
    text = format_tables(study([finished("causal", "rope"), healed, shorter]))
    assert "`alibi` starts from the trained `rope` of the same seed, trained for 20 steps more." in text
    assert "`alibi` was trained with `learning_rate=0.1`." in text
    assert "`none` was trained for 10 steps." in text
    assert "`rope` was" not in text


def test_a_figure_of_fewer_seeds_is_marked(results):
    changed = three_seeds()
    changed["runs"][0]["by_length"]["loss"][2] = None
    assert "`native`: some figures are of fewer seeds" in format_tables(changed)
    assert "fewer seeds" not in format_tables(results)


def test_a_model_that_was_only_read_is_in_no_loss_curve():
    read = finished("causal", "alibi", seconds=0.0, cpu_seconds=0.0) | {"from": "rope"}
    read["curve"] = {"step": [0], "train_loss": [], "validation_loss": [2.6]}
    results = study([finished("causal", "rope"), read])
    assert "`alibi` starts from the trained `rope` of the same seed, read as it is" in format_tables(results)
    figures = {figure.name: figure for figure in draw_figures(results)}
    assert "alibi" not in figures["causal_loss_curves"].alternative
    assert "causal_further_loss_curves" not in figures
    assert "alibi" not in figures["causal_loss_by_length"].alternative
    # Beside the model it starts from, which is drawn in both.
    assert all(name in figures["causal_further_loss_by_length"].alternative for name in ("rope", "alibi"))


def test_models_that_start_from_others_have_loss_curves_of_their_own():
    results = study([finished("causal", "rope"), finished("causal", "alibi") | {"from": "rope"}])
    figures = {figure.name: figure for figure in draw_figures(results)}
    assert "rope from" in figures["causal_loss_curves"].alternative
    assert "alibi from" in figures["causal_further_loss_curves"].alternative
    assert "alibi" not in figures["causal_loss_curves"].alternative


def test_lengths_in_words():
    assert ranges([1, 2, 3, 4]) == "1 to 4"
    assert ranges([1, 2, 4]) == "1, 2, 4"
    assert ranges([5]) == "5"


def test_findings_are_those_of_the_published_comparison():
    causal = findings(published_comparison(), "causal")
    # docs/results/compare: rope is best at 32 tokens, alibi at 128, and learned and sinusoidal collapse.
    assert "Lowest loss at 32 tokens: rope 1.556" in causal
    assert "Lowest loss at 128 tokens: alibi 1.632" in causal
    assert re.search(r"less than 0\.05 nats above that at 32: alibi\.", causal)
    assert "learned (+1.44), sinusoidal (+1.49)" in causal
    assert "one seed, which does not rank neighbours" in causal
    masked = findings(published_comparison(), "masked")
    assert "hardly anything was learned (left out below): none." in masked
    assert "none (+" not in masked


def test_findings_of_generalisation_tell_not_learning_from_not_generalising():
    lazy = finished("copy", "t5")
    lazy["exact_match"] = {"lengths": [5, 10, 12, 20], "accuracy": [0.9, 0.1, 0.0, 0.0], "token_accuracy": [1, 1, 1, 1]}
    text = findings(study([finished("copy", "none"), lazy]), "copy")
    assert "Learned the task (at length 10, which training had; 90 % or more exact): none." in text
    assert "Did not learn it in this budget (at length 10, which training had): t5 (10 %)." in text
    assert "beyond 10: none 25 %, t5 0 %" in text


def test_the_page_needs_nothing_beside_it(report):
    page = Page(report)
    sources = [image["src"] for image in page.all("img")]
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not page.all("script")
    assert not page.all("link")
    assert all(link["href"].startswith("#") for link in page.all("a"))
    assert not re.search(r"url\(|@import|https?://", report)
    assert "default-src 'none'" in report


def test_every_link_of_the_contents_leads_somewhere_and_every_place_is_there_once(report):
    page = Page(report)
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    links = {link["href"].removeprefix("#") for link in page.all("a")}
    assert links <= set(identifiers)
    assert {"command", "unfinished", "settings", "machine", "task-causal", "causal_loss_curves"} <= links


def test_the_page_can_be_read_without_seeing_it(report, results):
    page = Page(report)
    assert page.all("html")[0]["lang"] == "en"
    alternatives = [image["alt"] for image in page.all("img")]
    assert len(set(alternatives)) > 1
    assert all(len(text) > 40 for text in alternatives)
    assert any("rope-500k from 2.62 at length 16 to 3.12 at 64" in text for text in alternatives)
    assert all("scope" in cell for cell in page.all("th"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_the_page_has_everything_and_escapes_it(report):
    text = html.unescape(re.sub(r"<[^>]+>", "", report))
    for part in (
        "python training/compare.py training/studies/tiny.yaml",
        "learning_rate",
        "The loss became NaN at step 7.",
        "It <cannot> be.",
        "6 schemes, 3 tasks, 3 seeds: 28 runs, of which 24 finished",
        "11537469",
        "a processor",
        "5.23.0",
    ):
        assert part in text
    assert "It &lt;cannot&gt; be." in report
    assert "<cannot>" not in report
    assert "<code>rope(theta=500000)</code>" in report


def test_the_files_of_a_study(tmp_path):
    runs = [
        finished("copy", "native", model="models/copy-native-seed0"),
        finished("copy", "rope", model="models/absent"),
    ]
    results = study(runs)
    (tmp_path / "models" / "copy-native-seed0").mkdir(parents=True)
    written = write_outputs(results, tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in written]
    assert names[:2] == ["results.json", "table.md"]
    assert names[-2:] == ["report.html", "models/copy-native-seed0/README.md"]
    assert len([name for name in names if name.endswith(".png")]) == 4
    assert all(path.stat().st_size > 0 for path in written)
    assert read_json(tmp_path / "results.json") == results
    assert not list(tmp_path.rglob("*.partial"))
    before = {path: path.read_bytes() for path in written}
    assert main([str(tmp_path)]) == 0
    assert {path: path.read_bytes() for path in written} == before


def test_nothing_finished_is_still_a_report(tmp_path):
    results = study([unfinished("causal", "t5", 0, "failed", "The disk is full.")], corpus=None)
    names = [path.name for path in write_outputs(results, tmp_path)]
    assert names == ["results.json", "table.md", "report.html"]
    text = (tmp_path / "report.html").read_text()
    Page(text)
    assert "The disk is full." in text
    assert "None: the tasks make their own data." in text


def test_refused_results_leave_earlier_files_alone(results, tmp_path, capsys):
    (tmp_path / "results.json").write_text('{"name": "earlier"}\n')
    with pytest.raises(ResultsError, match="status is 'done'"):
        write_outputs(study([finished("causal", "rope", status="done")]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert main([str(tmp_path)]) == 2
    assert "missing 'settings'" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no results.json" in capsys.readouterr().err
