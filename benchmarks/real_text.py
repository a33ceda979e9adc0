"""Measures what a decaying bias saves on real text in a trained model, compared with the same model without position.

    python -m benchmarks.real_text --scheme forget_gate
    python -m benchmarks.real_text --scheme alibi --model SmolLM2-135M --steps 24 --lengths 4096 --text *.py

How many keys can be skipped depends on gates and on the norms of queries and keys, and so on training. By default, a
small Llama is trained on the bytes of a text. A pretrained model (`--model`, a folder) gets the scheme instead of its
own and is healed for some steps. The text is the reference manual that comes with Python, or the given files.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.arguments import length_of, scheme_name
from benchmarks.bare import shared_copy
from benchmarks.lineup import CONTROL
from benchmarks.machine import describe_machine, machine_line
from benchmarks.subjects import BARE, LanguageModel, Setting
from benchmarks.timing import Pace, time_subjects
from hf_posenc import patch_model
from hf_posenc.attention import fused_attention
from hf_posenc.attention.windows import Windows
from hf_posenc.recipes import swap_scheme


@dataclass(frozen=True)
class TextSetting(Setting):
    """A setting with the tokens of a text, `(tokens,)` int64."""

    stream: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def tokens(self, length: int, batch: int = 1) -> Tensor:
        """Returns `(batch, length)` tokens from the end of the stream, which is not used for training."""
        return self.stream[-length:].expand(batch, -1)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    options = _parse(arguments)
    torch.manual_seed(0)
    text = "\n".join(Path(file).read_text(encoding="utf-8") for file in options.text) or "\n".join(
        pydoc_data.topics.topics.values()
    )
    tokenizer = ByT5Tokenizer() if options.model is None else AutoTokenizer.from_pretrained(options.model)
    stream = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    longest = max(options.lengths)
    if len(stream) < longest + options.train_length:
        print(f"real_text: the text has only {len(stream)} tokens, too few for {longest}.", file=sys.stderr)
        return 2
    model = _model(options, stream[: len(stream) - longest])
    bare = shared_copy(model)
    patch_model(bare, "none")
    setting = TextSetting(stream=stream)
    subjects = [
        LanguageModel(BARE, BARE, setting, model=bare),
        LanguageModel(options.scheme, "scheme", setting, model=model),
        LanguageModel(CONTROL, BARE, setting, model=shared_copy(bare)),
    ]
    pace = Pace(rounds=options.rounds, cell_seconds=0.0, subject_seconds=math.inf)
    print(machine_line(describe_machine("cpu")))
    print(f"\n| phase | tokens | none, ms | none again | {options.scheme} | keys kept |")
    print("| --- | --- | --- | --- | --- | --- |")
    for length in options.lengths:
        with _kept_keys() as kept, torch.no_grad():
            model.eval()(setting.tokens(length), use_cache=False, logits_to_keep=1)
        share = f"{mean(kept):.3f}" if kept else "all"
        for phase in options.phases:
            rows = {row["subject"]: row for row in time_subjects(subjects, phase, length, pace, "cpu")["rows"]}
            again, scheme = (rows[name]["to_bare"]["median"] for name in (CONTROL, options.scheme))
            print(
                f"| {phase} | {length} | {rows[BARE]['milliseconds']:.0f} | {again:.2f} | {scheme:.2f} | {share} |",
                flush=True,
            )
    return 0


def _parse(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_text", description=__doc__.split("\n")[0])
    parser.add_argument("--scheme", type=scheme_name, default="forget_gate")
    parser.add_argument("--model", help="folder of a pretrained model; by default, a small Llama is trained")
    parser.add_argument("--text", nargs="*", default=[], help="text files (default: Python's reference manual)")
    parser.add_argument("--steps", type=int, default=300, help="number of steps of training or healing")
    parser.add_argument("--train_length", type=length_of, default=512, help="tokens per training row")
    parser.add_argument("--lengths", type=length_of, nargs="+", default=[4096, 16384], help="lengths to time")
    parser.add_argument("--phases", nargs="+", choices=("forward", "train"), default=["forward", "train"])
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(arguments)


def _model(options: Any, stream: Tensor) -> Any:
    if options.model is None:
        config = LlamaConfig(
            hidden_size=512, intermediate_size=1376, num_hidden_layers=2, num_attention_heads=8, vocab_size=384
        )
        model = patch_model(LlamaForCausalLM(config), options.scheme)
        rate, rows = 1e-3, 4
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        swap_scheme(model, options.scheme, sample=stream[: 2 * options.train_length].view(2, -1))
        rate, rows = 1e-4, 2
    _train(model, stream, options.steps, rows, options.train_length, rate)
    return model


def _train(model: Any, stream: Tensor, steps: int, rows: int, length: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    model.train()
    losses, start = [], time.monotonic()
    for _ in range(steps):
        begins = torch.randint(len(stream) - length, (rows,), generator=generator)
        batch = torch.stack([stream[begin : begin + length] for begin in begins.tolist()])
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if losses:
        print(f"trained {steps} steps in {time.monotonic() - start:.0f} s: loss {losses[0]:.2f} to {losses[-1]:.2f}")


@contextmanager
def _kept_keys() -> Iterator[list[float]]:
    """Within this context, records the share of visible keys that each causal attention call has read."""
    shares: list[float] = []

    find = fused_attention.windows_of

    def noted(*args: Any) -> Windows | None:
        windows = find(*args)
        kept = 1.0 if windows is None else (windows.last - windows.first + 1).sum() / (windows.last + 1).sum()
        shares.append(float(kept))
        return windows

    with mock.patch.object(fused_attention, "windows_of", noted):
        yield shares


if __name__ == "__main__":
    sys.exit(main())
