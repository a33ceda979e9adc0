"""The code in README.md and in pages of docs/ runs on a small model, and pages quote files as they are."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    BertTokenizer,
    LlamaForCausalLM,
)

import hf_posenc
from hf_posenc.patching.anatomy.architectures import declaration
from hf_posenc.schemes import registry
from tests.models import tiny, word_tokenizer
from tests.patching.composites.models import COMPOSITES
from tests.versions import before

ROOT = Path(__file__).resolve().parent.parent


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return tiny(
        "LlamaForCausalLM", vocab_size=16, hidden_size=64, num_hidden_layers=4, num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip


def blocks(page: str, section: str = "") -> list[str]:
    """The Python code of a page, or of the part behind the heading `section`."""
    text = (ROOT / page).read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    text = text.replace("cache=cache", "past_key_values=cache") if before("5.24") else text
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def leave_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
    monkeypatch.setattr(declaration, "_ARCHITECTURES", dict(declaration._ARCHITECTURES))
    monkeypatch.chdir(tmp_path)


def run(page: str, scope: dict[str, Any], section: str = "") -> dict[str, Any]:
    for number, block in enumerate(blocks(page, section)):
        exec(compile(block, f"{page} block {number}", "exec"), scope)
    return scope


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", ["README.md", "docs/how_to/patching.md"])
def test_the_first_pages_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_llama().config
    load = functools.partial(AutoModelForCausalLM.from_config, config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, **options: load(**options))
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", lambda name: COMPOSITES["llava"].model())
    monkeypatch.setattr(AutoModelForSeq2SeqLM, "from_pretrained", lambda name: tiny("T5ForConditionalGeneration"))
    scope = run(page, {})
    assert not hasattr(scope["model"], "position_encoding")
    if page != "README.md":
        assert Path("patched/config.json").is_file()


def test_the_code_of_the_training_page_runs() -> None:
    ids = torch.arange(8)
    scope = {"model": small_llama(), "dataset": [{"input_ids": ids, "labels": ids}] * 4}
    run("docs/how_to/training.md", scope, section="In your own training loop")
    assert type(scope["phases"]).__name__ == "SchemePhasesCallback"
    decayed, undecayed = scope["optimizer"].param_groups
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)


def test_the_code_of_the_adapters_page_runs() -> None:
    small_llama().save_pretrained("base")
    BertTokenizer(vocab={"[UNK]": 0, "[PAD]": 1, "the": 2, "dog": 3}).save_pretrained("base")
    scope = run("docs/how_to/adapters.md", {"texts": ["the dog", "the dog the dog"] * 8})
    for name in ("again", "base", "reference"):
        assert scope[name].position_encoding.config == scope["model"].position_encoding.config
    assert not hasattr(scope["stock"], "position_encoding")
    assert sum(path.stat().st_size for path in Path("scheme").iterdir()) < 16_000


def test_the_dog_test_of_the_page_on_evaluations_runs() -> None:
    tokenizer = word_tokenizer(["[UNK]", "The", "dog", "chased", "another"])
    scope = {"model": tiny("BertModel", vocab_size=16), "tokenizer": tokenizer}
    run("docs/how_to/evaluations.md", scope, section="The dog test")
    assert [record.passed for record in scope["result"].of(quantity="told_apart")] == [True, False, True]


def test_the_code_of_the_architecture_page_runs_and_acts() -> None:
    model = small_llama().eval()
    scope = run("docs/explanation/architecture.md", {"model": model})
    ids = torch.arange(14).unsqueeze(0)
    near = hf_posenc.patch_model(small_llama().eval(), ["native", "near"])
    with torch.no_grad():
        stock, none = small_llama().eval()(ids).logits, hf_posenc.patch_model(small_llama().eval(), "none")(ids).logits
        for parameter in near.position_encoding.parameters():
            nn.init.ones_(parameter)
        for changed in (model, near, hf_posenc.patch_model(small_llama().eval(), "window", reach=2)):
            logits = changed(ids).logits
            assert (logits - stock).abs().max() > 1e-3
            assert (logits - none).abs().max() > 1e-3
    assert model.position_encoding.config == scope["ClockConfig"](period=32.0)
    # Every layer has its own.
    assert len(list(near.position_encoding.parameters())) == 4


def test_the_code_of_the_page_on_context_length_runs() -> None:
    model = tiny("BertModel", vocab_size=16)
    tokenizer = word_tokenizer(["[UNK]", "dog"], model_max_length=64)
    run("docs/how_to/context_length.md", {"model": model, "tokenizer": tokenizer})
    assert model.config.max_position_embeddings == 256


@pytest.mark.parametrize("generates", [False, True])
def test_the_code_of_the_page_of_limits_runs_and_the_next_call_needs_positions(generates: bool) -> None:
    scope = run("docs/reference/limits.md", {}, section="Changed caches")
    model, cache, kept = scope["model"], scope["cache"], [0, 1, 6, 7, 8, 9, 10]
    call, ids = (model.generate, [*kept, 11]) if generates else (model, [11])
    with pytest.raises(hf_posenc.UnsupportedError, match=r"Pass position_ids to every call.*also to `generate`"):
        call(torch.tensor([ids]), past_key_values=cache)


def test_what_the_page_of_wrong_claims_prints_is_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    page, scope = "docs/explanation/wrong_claims.md", {}
    promised = [line[2:] for block in blocks(page) for line in block.splitlines() if line.startswith("# ")]
    run(page, scope)
    assert capsys.readouterr().out.splitlines() == promised
    assert promised


@pytest.mark.parametrize(
    ("source", "row", "figures"),
    [
        ("results/price/table.md", "| t5          | distance bias ", ["1.073"]),
        ("results/price/table.md", "| rope        | rotation ", ["1.006"]),
        ("results/price/table.md", "| T5, bias computed in each call ", ["7.91", "1.76"]),
        ("results/price/table.md", "| T5, bias computed in each call ", ["8.35", "3.24"]),
        ("results/price/table.md", "| T5 without position ", ["4.49"]),
        ("results/price/table.md", "| T5 without position ", ["2.69"]),
        ("study/results.md", "| Learned and sinusoidal positions: ", ["-0.028", "+0.000"]),
        ("study/results.md", "|  | `learned` and `sinusoidal` ", ["-0.053 [-0.097, -0.009]"]),
        ("study/results.md", "| `learned` ", ["577 ± 53"]),
        ("study/results.md", "| `learned` ", ["3.383 ± 0.154"]),
        ("study/results.md", "| `sinusoidal` ", ["1.339", "3.738", "3.919 ± 0.204"]),
        ("study/results.md", "| `sinusoidal` ", ["739 ± 109"]),
        ("results/findings/table.md", "| sinusoidal ", ["-0.341 ± 0.156"]),
        ("study/results.md", "| `rope` ", ["1.222", "2.988", "4.010"]),
        ("study/results.md", "| `none` ", ["2.172 ± 0.040"]),
        ("results/findings/table.md", "| alibi ", ["1.603", "1.584"]),
        ("results/findings/table.md", "| alibi ", ["1.557", "1.561"]),
        ("study/results.md", "The loss of a model that knows token frequencies", ["3.066"]),
        ("results/properties.md", "| rope ", ["5.2e-04"]),
    ],
)
def test_the_page_of_wrong_claims_quotes_its_sources(source: str, row: str, figures: list[str]) -> None:
    page = " ".join((ROOT / "docs" / "explanation" / "wrong_claims.md").read_text().split())
    lines = [line for line in (ROOT / "docs" / source).read_text().splitlines() if line.startswith(row)]
    assert any(all(figure in line for figure in figures) for line in lines), (source, row, figures)
    assert all(figure in page for figure in figures)


def test_the_readme_counts_the_schemes() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    count = len(hf_posenc.list_schemes())
    assert f"There are {count} schemes, among them" in readme
    assert f"| {count} schemes, and your own |" in readme


def test_the_readme_counts_architectures_as_their_page_does() -> None:
    page = (ROOT / "docs" / "reference" / "architectures.md").read_text()
    attending = re.search(r"Of the other (\d+):\n", page).group(1)
    counts = re.findall(r"^- \**(\d+) (work|fail a check|are refused|were not built)\b", page, flags=re.MULTILINE)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{counts[0][0]} of the {attending} architectures" in readme
    assert f"Of {attending} architectures with softmax self-attention, {counts[0][0]} work" in readme
    assert all(f"{count} {what}" in readme for count, what in counts)
    assert sum(int(count) for count, _ in counts) == int(attending)


ROOMS = [f"hf_posenc/patching/{room}" for room in ("place", "layouts", "call", "anatomy")]


@pytest.mark.parametrize("folder", ["hf_posenc", "hf_posenc/schemes", "hf_posenc/patching", *ROOMS])
def test_the_architecture_page_names_every_module_and_folder_of_its_layouts(folder: str) -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    layouts = re.findall(r"^```\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    package = Path(folder).parent.name if folder in ROOMS else Path(folder).name
    (layout,) = [text for text in layouts if text.startswith(f"{package}/")]
    named = set(re.findall(r"\w+/?", layout))
    found = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    found |= {f"{path.name}/" for path in (ROOT / folder).iterdir() if any(path.glob("*.py"))}
    assert found - named == set()


@pytest.mark.parametrize(("page", "least"), [("architecture", 10), ("reliability", 8)])
def test_every_file_that_a_page_names_exists(page: str, least: int) -> None:
    text = (ROOT / "docs" / "explanation" / f"{page}.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w/]+\.py|(?:tests|docs|hf_posenc)/[\w/.]+)`", text))
    assert len(names) >= least
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")]
    missing = [name for name in names if not any(f"/{file}".endswith(f"/{name}") for file in files)]
    assert [name for name in missing if not (ROOT / name).exists()] == []
