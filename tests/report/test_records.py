"""Records, and the tables that are made of them."""

import functools
import json
from collections import Counter
from random import Random

import pytest

from hf_posenc.cli.parser import main
from hf_posenc.report import Quantity, Record, Result, Subject, View
from tests.hostile.kinds import json_bytes
from tests.hostile.mutations import change_of_json

LOSS = Quantity("loss", "{length}", "Losses are in nats.", style="loss")
RIGHT = Quantity("right", "right", style="fraction")


@pytest.fixture
def result() -> Result:
    return Result(
        task="example",
        title="An example",
        quantities=(LOSS, RIGHT, Quantity("apart", "apart", style="verdict")),
        subjects=(
            Subject("native (rope)", "native", {"scheme": "rope"}),
            Subject("alibi", "alibi", {"scheme": "alibi"}, notes=("New weights.",)),
            Subject("cope", "cope", error="It is causal only."),
        ),
        records=(
            Record("native (rope)", "loss", 1.23456, {"length": 8}, count=7),
            Record("native (rope)", "loss", None, {"length": 16}, note="The table ends."),
            Record("native (rope)", "right", 0.5, {"kind": "all"}, 0.4, 0.6),
            Record("native (rope)", "right", 1.0, {"kind": "hard"}, 0.8, 1.0),
            Record("native (rope)", "apart", 0.25, passed=True),
            Record("alibi", "loss", 2.0, {"length": 8}),
            Record("alibi", "right", 0.25, {"kind": "all"}),
            Record("alibi", "apart", passed=False),
        ),
        views=(View(("loss", "apart"), "Losses"), View(("right",), rows=("kind",))),
        settings={"model": "Tiny"},
        remarks=("A remark.",),
    )


def test_subjects_are_found_by_label_or_scheme_and_values_by_where_they_were_measured(result):
    assert result.subject("native") is result.subject("native (rope)")
    with pytest.raises(KeyError, match=r"'rope' was not measured.*native \(rope\)"):
        result.subject("rope")
    assert result.value("native", "loss", length=8) == 1.23456
    assert result.record("native", "right", kind="all").high == 0.6
    assert [record.value for record in result.of(quantity="loss", length=8)] == [1.23456, 2.0]
    with pytest.raises(KeyError, match="2 records"):
        result.value("native", "loss")
    with pytest.raises(KeyError, match="0 records"):
        result.value("alibi", "loss", length=16)


def test_a_file_holds_everything(result, tmp_path):
    result.save(tmp_path / "result.json")
    assert Result.load(tmp_path / "result.json") == result
    entry = json.loads((tmp_path / "result.json").read_text())
    assert entry["records"][5] == {"subject": "alibi", "quantity": "loss", "value": 2.0, "at": {"length": 8}}
    with pytest.raises(ValueError, match="'format' is 9"):
        Result.from_dict(entry | {"format": 9})


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("records.0.value", "1.5", "records.0.value is '1.5'; expected a valid number."),
        ("records.0.value", float("nan"), "records.0.value is nan; expected a finite number."),
        ("records.3.at.kind", 3, "records.3.at.kind is 3; expected text, as elsewhere."),
        ("records.2.at", {}, "records.2.at.* expected the keys of '{kind}'."),
        ("records.1.subject", "rop", r"records.1.subject is 'rop'; expected one of native \(rope\),"),
        ("records.1.quantity", "los", "records.1.quantity is 'los'; expected one of loss, right"),
        ("records.1.valu", 3, "records.1.valu is not a known key."),
        ("subjects.1.scheme", ..., "subjects.1.scheme is missing; expected a value."),
        ("subjects.1.notes", "New.", "subjects.1.notes is 'New.'; expected a valid array."),
        ("subjects.1.label", "cope", "labels repeat"),
        ("quantities.0.style", "los", "quantities.0: .*expected one of"),
        ("views.0.quantities.0", "x", "views.0.quantities is 'x'; expected one of loss"),
        ("settings.of_model", 3, "settings.of_model is 3; expected named values."),
        ("title", None, "title is None; expected a valid string."),
    ],
)
def test_a_result_that_somebody_edited_is_refused_by_its_key(result, where, value, message):
    entry = json.loads(json.dumps(result.to_dict()))
    entry["quantities"][1]["heading"] = "{kind}"
    *places, last = [int(key) if key.isdigit() else key for key in where.split(".")]
    holder = functools.reduce(lambda inside, key: inside[key], places, entry)
    if value is ...:
        del holder[last]
    else:
        holder[last] = value
    with pytest.raises(ValueError, match=message):
        Result.from_dict(entry)


def test_whatever_is_edited_is_shown_or_refused_with_file_and_reason(result, tmp_path, capsys):
    entry, rng, outcomes = json.loads(json.dumps(result.to_dict())), Random(0), Counter()
    file, sound = tmp_path / "a.json", tmp_path / "b.json"
    result.save(sound)
    for number in range(120):
        change = change_of_json(entry, [()], rng)
        file.write_bytes(json_bytes(change.applied(entry)))
        status = main(["report", str(file), *([str(sound)] if number % 2 else [])])
        said = capsys.readouterr().err
        assert status == 0 or "a.json" in said or "a and b" in said, (change, said)
        outcomes[status] += 1
    assert min(outcomes.values()) >= 10


def test_a_number_that_json_does_not_have_is_refused(result, tmp_path):
    broken = Result("x", "x", (), (), (Record("a", "b", float("nan")),), ())
    with pytest.raises(ValueError, match="JSON"):
        broken.save(tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()


def test_a_frame_has_a_row_per_record(result):
    pytest.importorskip("pandas")
    frame = result.frame()
    assert len(frame) == len(result.records)
    assert frame.query("scheme == 'native' and length == 8")["value"].item() == 1.23456
    assert set(frame["task"]) == {"example"}


def test_a_table_of_columns_one_of_rows_with_intervals_and_the_notes_below_them_once(result):
    lines = str(result).split("\n")
    assert result._repr_markdown_() == result.table(markdown=True)
    assert lines[0] == "An example"
    assert lines[2] == "Losses:"
    assert lines[4].split() == ["scheme", "8", "16", "apart"]
    assert lines[6].split() == ["native", "(rope)", "1.235", "-", "[1]", "yes", "0.25"]
    assert lines[7].split() == ["alibi", "[2]", "2", "-", "no"]
    assert lines[8].split() == ["cope", "[3]", "-", "-", "-"]
    lines = result.table(markdown=True).split("\n")
    header = next(index for index, line in enumerate(lines) if line.startswith("| scheme") and "kind" in line)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[header : header + 6]]
    assert cells[0] == ["scheme", "kind", "right", "95 % interval"]
    assert cells[2] == ["native (rope)", "all", "0.500", "0.400 to 0.600"]
    assert cells[3] == ["native (rope)", "hard", "1.000", "0.800 to 1.000"]
    assert cells[4] == ["alibi [2]", "all", "0.250", "-"]
    assert cells[5] == ["cope [3]", "-", "-", "-"]
    text = result.table()
    for note in ("[1] The table ends.", "[2] New weights.", "[3] cannot be measured: It is causal only."):
        assert text.count(note) == 1
    assert text.index("Losses are in nats.") < text.index("A remark.") < text.index("[1] The table")


def test_a_view_can_show_some_places_only(result):
    shown = Result(
        result.task, result.title, result.quantities, result.subjects, result.records,
        views=(View(("loss",), shown={"length": [8]}),),
    )  # fmt: skip
    assert "16" not in shown.table()
    assert "The table ends." not in shown.table()


@pytest.mark.parametrize(
    ("style", "value", "text"),
    [
        ("number", 0.12345, "0.123"), ("number", 1e-7, "1.0e-07"), ("number", 0.0, "0"), ("signed", 0.5, "+0.5"),
        ("signed", -0.5, "-0.5"), ("loss", 1.23456, "1.235"), ("fraction", 0.5, "0.500"), ("count", 12.0, "12"),
    ],
)  # fmt: skip
def test_styles(style, value, text):
    from hf_posenc.report.records import format_value

    assert format_value(Record("a", "b", value), Quantity("b", "b", style=style)) == text
    assert format_value(Record("a", "b", value, shown="x"), Quantity("b", "b", style=style)) == "x"
    assert format_value(Record("a", "b"), Quantity("b", "b", style=style)) == "-"
