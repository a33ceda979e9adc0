"""CLIP past 77 tokens: captions of up to 248 tokens that name what is in the picture at their end.

A small CLIP learns scikit-learn's digits from captions of at most 77 tokens. Then its position table gets 248 rows as
in Long-CLIP, without further training. You see how often it finds the right caption before and after.

    pip install scikit-learn
    python examples/long_clip.py
"""

import torch
from sklearn.datasets import load_digits
from transformers import CLIPConfig, CLIPModel

from hf_posenc.recipes import swap_scheme

PAD, START, FIRST_DIGIT, FIRST_WORD, END = 0, 1, 2, 12, 63
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 64, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
torch.manual_seed(0)


def captions(labels, shortest, longest):
    """`(captions, tokens)`: random words, and then the digit."""
    rows = []
    for label in labels:
        words = torch.randint(FIRST_WORD, END, (int(torch.randint(shortest, longest + 1, ())) - 3,))
        rows.append([START, *words.tolist(), FIRST_DIGIT + label, END])
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def accuracy(shortest, longest, most):
    """The share of pictures whose caption is found among ten, one for each digit; mean over ten sets of captions."""
    right = []
    for _ in range(10):
        texts = captions(range(10), shortest, longest)
        if longest > most:  # a tokenizer keeps the end token
            texts = torch.cat((texts[:, : most - 1], torch.full((10, 1), END)), dim=1)
        with torch.no_grad():
            scores = model(input_ids=texts, pixel_values=pictures[1500:]).logits_per_image
        right.append((scores.argmax(1) == labels[1500:]).float().mean())
    return float(torch.stack(right).mean())


images, labels = map(torch.tensor, load_digits(return_X_y=True))
pictures = images.float().div(16).view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
by_digit = [(labels[:1500] == digit).nonzero().flatten() for digit in range(10)]
config = CLIPConfig(text_config=TEXT, vision_config=SIZES | {"image_size": 8, "patch_size": 2}, projection_dim=32)
model = CLIPModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(600):
    chosen = torch.stack([of_one[torch.randint(len(of_one), ())] for of_one in by_digit])
    model(captions(range(10), 4, 77), pictures[chosen], return_loss=True).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
print("Pictures whose caption is found among ten (chance is 0.1)\n")
print(f"{'the text part reads':20} {'captions of 40 to 77 tokens':>28} {'of 200 to 248':>14}")
print(f"{'77 tokens':20} {accuracy(40, 77, 77):28.2f} {accuracy(200, 248, 77):14.2f}")
swap_scheme(model, "learned", num_positions=248, table_extension="long_clip", part="text")
print(f"{'248 tokens':20} {accuracy(40, 77, 248):28.2f} {accuracy(200, 248, 248):14.2f}")
