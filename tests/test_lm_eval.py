"""lm-evaluation-harness on patched models, with local tasks only."""

import importlib.util
import json
import re
import shlex
import sys

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from hf_posenc import patch_model, unpatch_model
from hf_posenc.entry import INSTALL
from hf_posenc.metrics.generalization import SyntheticExamples, compare_generalization
from tests.fresh import ROOT, printed, run_fresh, run_python
from tests.models import tiny

TASKS = ROOT / "eval" / "lm_eval_tasks"

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'lm-eval>=0.4.13'"
)

QUESTIONS = [
    {"question": "the dog chased another", "choices": [" dog", " cat"], "answer": 0},
    {"question": "aaaa bbbb aaaa", "choices": [" bbbb", " aaaa"], "answer": 0},
    {"question": "one two three two three", "choices": [" one", " two"], "answer": 1},
]


@pytest.fixture(scope="module")
def tokenizer():
    return ByT5Tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A patched model that has learned to copy a few characters, saved."""
    torch.manual_seed(0)
    model = tiny(
        "LlamaForCausalLM", vocab_size=len(tokenizer), initializer_range=0.2, pad_token_id=0, bos_token_id=None,
        eos_token_id=1,
    )  # fmt: skip
    model = patch_model(model, "alibi")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    examples = SyntheticExamples("repeated_copy", range(1, 5), 0, tokenizer, size=150 * 32)
    for batch in DataLoader(examples, batch_size=32):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    path = tmp_path_factory.mktemp("patched")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def local_task(tmp_path_factory):
    """A task of lm-eval in two local files."""
    path = tmp_path_factory.mktemp("tasks")
    (path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    task = {
        "task": "local_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path / "questions.jsonl")}, "cache_dir": str(path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    # JSON is YAML.
    (path / "local_questions.yaml").write_text(json.dumps(task))
    return path


def words(folder, task, include, output):
    # lm-eval lets a tokenizer add what it adds to a text, and ByT5 adds the end token: to the prompt.
    model = f"pretrained={folder},add_bos_token=False"
    return [
        "run", "--model", "hf", "--model_args", model, "--tasks", task, "--include_path", str(include),
        "--device", "cpu", "--output_path", str(output), "--log_samples",
    ]  # fmt: skip


def results(output):
    (file,) = output.rglob("results_*.json")
    return json.loads(file.read_text())["results"]


def samples(output):
    (file,) = output.rglob("samples_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.long
@needs_lm_eval
def test_the_task_of_the_page_reads_its_text(folder, tmp_path, monkeypatch):
    from lm_eval.__main__ import cli_evaluate

    page = (ROOT / "docs" / "how_to" / "evaluations.md").read_text()
    task, typed = re.search(
        r"```yaml\n(task: speech.*?)```\s+```\nhf-posenc lm-eval (.*?)\n```", page, re.DOTALL
    ).groups()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "speech.yaml").write_text(task)
    (tmp_path / "tasks" / "speech.txt").write_text("The dog chased another dog. " * 4)
    monkeypatch.chdir(tmp_path)
    given = [
        f"pretrained={folder},max_length=32" if "pretrained=" in word else word
        for word in shlex.split(typed.replace("\\\n", ""))
    ]
    monkeypatch.setattr(sys, "argv", ["lm-eval", *given, "--output_path", "out"])
    cli_evaluate()
    assert 0 < results(tmp_path / "out")["speech"]["bits_per_byte,none"] < 20


@pytest.mark.long
@needs_lm_eval
def test_log_likelihoods_are_those_of_the_patched_model(folder, local_task, tmp_path, tokenizer, monkeypatch):
    from lm_eval.__main__ import cli_evaluate

    monkeypatch.setattr(sys, "argv", ["lm-eval", *words(folder, "local_questions", local_task, tmp_path)])
    cli_evaluate()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.position_encoding.config.name == "alibi"

    def log_likelihood(model, question, choice):
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, choice))
        with torch.no_grad():
            log_probs = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
        return sum(float(log_probs[len(before) + place - 1, token]) for place, token in enumerate(after))

    right = 0
    for sample in samples(tmp_path):
        question = sample["doc"]
        reported = [float(response[0][0]) for response in sample["resps"]]
        expected = [log_likelihood(model, question["question"], choice) for choice in question["choices"]]
        assert reported == pytest.approx(expected, abs=1e-3)  # rounded in the file
        right += expected.index(max(expected)) == question["answer"]
    assert results(tmp_path)["local_questions"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    # The stock model of the same weights gives different numbers, so that the comparison shows something.
    stock = [log_likelihood(unpatch_model(model), QUESTIONS[0]["question"], choice) for choice in (" dog", " cat")]
    first = next(sample for sample in samples(tmp_path) if sample["doc"] == QUESTIONS[0])
    assert [float(response[0][0]) for response in first["resps"]] != pytest.approx(stock, abs=1e-2)


@pytest.mark.slow
@needs_lm_eval
def test_the_synthetic_task_counts_as_the_library_does(folder, tmp_path, tokenizer):
    options = {"synthetic_task": "repeated_copy", "lengths": [2, 4, 6], "samples": 5}
    command = words(folder, "hf_posenc_length_generalization", TASKS, tmp_path)
    command = ["-m", "hf_posenc", "lm-eval", *command, "--metadata", json.dumps(options)]
    printed(run_python(*command, environment={"OMP_NUM_THREADS": "1"}))
    reported = results(tmp_path)["hf_posenc_length_generalization"]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = compare_generalization(model, tokenizer, "repeated_copy", [2, 4, 6], samples=5)
    # Equally many examples of each length.
    mean = sum(row.value for row in expected.of(quantity="exact_match")) / 3
    assert 0 < mean < 1
    assert reported["exact_match,none"] == pytest.approx(mean)


@pytest.mark.long
@needs_lm_eval
def test_without_the_plugin_lm_eval_stops_and_names_it(folder, local_task, tmp_path):
    program = "import runpy; runpy.run_module('lm_eval', run_name='__main__', alter_sys=True)"
    finished = run_fresh(program, *words(folder, "local_questions", local_task, tmp_path), folder=tmp_path)
    assert finished.returncode != 0
    assert f"has model type `hf_posenc ({INSTALL}, " in finished.stderr
    assert not list(tmp_path.rglob("results_*.json"))
