"""A chat over HTTP: `hf-posenc serve` and openai's client, beside `generate`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from transformers import AutoTokenizer

from hf_posenc.report import Record
from tests.kits.everywhere.models import ROOT, loaded, slug
from tests.kits.everywhere.plan import Plan, Variant
from tests.kits.everywhere.steps import Steps

QUESTIONS = ("What is the capital of France?", "Name three colours.")


def run_chat(steps: Steps, source: Path, variant: Variant, plan: Plan) -> list[Record]:
    """Starts a server on a free port of this machine, streams an answer to each question, and stops it."""

    def measure() -> list[Record]:
        from tests.serving.chats import chat, client, expected, free_port, wait_for

        port = free_port()
        command = [sys.executable, "-m", "hf_posenc.cli", "serve", str(source), "--port", str(port), "--device", "cpu"]
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=sys.stderr) as server:
            try:
                wait_for(f"http://127.0.0.1:{port}", 120)
                answers = [chat(client(port), source, messages, plan.chat_tokens) for messages in chats]
            finally:
                server.terminate()
        with loaded(source) as model:
            tokenizer = AutoTokenizer.from_pretrained(source)
            texts = [expected(model, tokenizer, messages, plan.chat_tokens) for messages in chats]
        equal = sum(answer == text for answer, text in zip(answers, texts, strict=True))
        shown = f"{equal} of {len(texts)}"
        details = {"questions": list(QUESTIONS), "answers": answers, "generate": texts}
        return [Record(variant.name, "chat", equal / len(texts), count=len(texts), shown=shown, details=details)]

    settings = {"variant": asdict(variant), "questions": QUESTIONS, "tokens": plan.chat_tokens}
    return steps.measured(f"chat-{slug(variant)}", settings, measure)
