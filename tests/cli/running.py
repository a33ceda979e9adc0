"""Running commands, and the models they write."""

import torch

from hf_posenc.cli import main


def refused(capsys, *words):
    """Runs a command that must be refused, and returns the one line that says why."""
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    # Progress bars may come before.
    lines = [line for line in captured.err.splitlines() if line and "it/s]" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("hf-posenc: error: ")
    return lines[0]


def logits(folder):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.tensor([[4, 5, 6, 7, 5]])).logits
