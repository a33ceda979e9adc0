"""`transformers serve` with the plugin, called by openai's client over HTTP."""

from __future__ import annotations

import concurrent.futures
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from hf_posenc import export_model
from tests.integrations.subject import llama, tokenizer

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.serving.chats import chat, client, expected, free_port, server, wait_for  # noqa: E402

CHATS = [[{"role": "user", "content": text}] for text in ("w5 w9 w12", "w7 w7 w8 w30 w31 w6", "w20")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints of several schemes. `learned` has no positions after the first 16."""
    root = tmp_path_factory.mktemp("models")
    schemes: dict[str, Any] = {
        "alibi": "alibi", "yarn": {"scheme": "rope", "scaling": {"type": "yarn", "factor": 4.0,
        "original_max_positions": 16}}, "learned": {"scheme": "learned", "num_positions": 16},
        "unsupported": "normalized_integer",
    }  # fmt: skip
    for name, scheme in schemes.items():
        llama(scheme).save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    return {name: root / name for name in schemes}


@pytest.mark.long
def test_the_printed_line_serves_an_export_without_the_plugin(tmp_path: Path) -> None:
    model = llama("p_rope")
    report = export_model(model, tmp_path / "an export", tokenizer=tokenizer())
    (line,) = [line for line in str(report).splitlines() if line.startswith("Serve it: transformers serve ")]
    port = free_port()
    words = [
        *shlex.split(line.removeprefix("Serve it: ")),
        "--port",
        str(port),
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    words[0] = str(Path(sys.executable).with_name(words[0]))
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}", 120)
            found = chat(client(port), tmp_path / "an export", CHATS[0])
        finally:
            process.terminate()
    assert found.split() == expected(model, tokenizer(), CHATS[0]).split()


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_streamed_chats_equal_generate(folders: dict[str, Path]) -> None:
    with server() as served, concurrent.futures.ThreadPoolExecutor(3) as threads:
        for name in ("alibi", "yarn"):
            model = loaded(folders[name])
            wanted = [expected(model, tokenizer(), messages) for messages in CHATS]
            found = threads.map(lambda messages, name=name: chat(served, folders[name], messages), CHATS)
            assert [text.split() for text in found] == [text.split() for text in wanted]
            assert all(wanted)


def test_continuous_batching_streams_the_same(folders: dict[str, Path]) -> None:
    options = {"cb_block_size": 8, "cb_num_blocks": 16, "cb_max_batch_tokens": 16}
    with server(continuous_batching=True, **options) as served, concurrent.futures.ThreadPoolExecutor(3) as threads:
        model = loaded(folders["alibi"])
        found = threads.map(lambda messages: chat(served, folders["alibi"], messages), CHATS)
        wanted = [expected(model, tokenizer(), messages) for messages in CHATS]
        assert [text.split() for text in found] == [text.split() for text in wanted]
        # A scheme that continuous batching cannot compute, streamed and whole.
        for stream in (True, False):
            with pytest.raises(openai.BadRequestError) as refused:
                served.chat.completions.create(
                    model=str(folders["unsupported"]), messages=CHATS[0], max_tokens=2, stream=stream
                )
            assert "normalized_integer" in refused.value.message
            assert "model.generate()" in refused.value.message
        assert chat(served, folders["alibi"], CHATS[0]).split() == wanted[0].split()


def test_what_fails_in_the_middle_says_why(folders: dict[str, Path]) -> None:
    """The prompt fits into the 16 positions of the table, the answer does not."""
    with server() as served:
        with pytest.raises(openai.APIError) as failed:
            chat(served, folders["learned"], CHATS[1], new_tokens=20)
        assert "16" in str(failed.value.body)
        with pytest.raises(openai.BadRequestError, match="16"):
            served.chat.completions.create(model=str(folders["learned"]), messages=CHATS[1], max_tokens=20)
        assert chat(served, folders["learned"], CHATS[0])


def test_weights_of_another_scheme_are_refused_with_the_reason(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["alibi"], tmp_path / "model")
    shutil.copy(folders["yarn"] / "model.safetensors", tmp_path / "model")
    with server() as served, pytest.raises(openai.BadRequestError, match="alibi"):
        chat(served, tmp_path / "model", CHATS[0])


def test_messages_of_errors_stay_json() -> None:
    from transformers.cli.serving.utils import _StreamError

    text = 'a "quoted" name,\na new line and a \\'
    assert _StreamError(text).msg == text
    assert f"{_StreamError(text).msg}" == 'a \\"quoted\\" name,\\na new line and a \\\\'


def test_patched_models_in_the_cache_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    for module in ("huggingface_hub.constants", "huggingface_hub.utils._cache_manager"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(cache))
    with server() as served:
        assert list(served.models.list()) == []
        for name, source in (("me/stock", None), ("me/alibi", "alibi")):
            folder = cache / f"models--{name.replace('/', '--')}"
            snapshot = folder / "snapshots" / ("1" * 40)
            (folder / "refs").mkdir(parents=True)
            for branch in ("main", "second"):
                (folder / "refs" / branch).write_text("1" * 40)
            llama(source).save_pretrained(snapshot)
        listed = [entry.id for entry in served.models.list()]
    assert sorted(listed) == ["me/alibi", "me/alibi@second", "me/stock", "me/stock@second"]
