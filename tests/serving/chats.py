"""Servers on this machine, and chats with them by openai's client."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from tests.processes import free_port


def wait_for(address: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def server(**options: Any) -> Iterator[Any]:
    """A client of a server in this process."""
    from transformers.cli.serve import Serve

    port = free_port()
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "log_level": "error"}
    running = Serve(host="127.0.0.1", port=port, non_blocking=True, **(settings | options))
    try:
        wait_for(f"http://127.0.0.1:{port}", 30)
        yield client(port)
    finally:
        running.kill_server()


def client(port: int) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0, timeout=600)


def chat(served: Any, model: Path | str, messages: Any, new_tokens: int = 6, **options: Any) -> str:
    """The text of an answer that is streamed."""
    pieces = served.chat.completions.create(
        model=str(model), messages=messages, max_tokens=new_tokens, temperature=0.0, stream=True, **options
    )
    return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


def expected(model: Any, coder: Any, messages: Any, new_tokens: int = 6) -> str:
    """The same text by `generate`."""
    given = coder.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**given, max_new_tokens=new_tokens, do_sample=False)
    return coder.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
