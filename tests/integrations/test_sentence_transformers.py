"""sentence-transformers reads a patched encoder past the old limit, saves it, and has it back in a fresh process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hf_posenc

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed: pip install '.[tools]'")

from sentence_transformers import CrossEncoder, SentenceTransformer

from tests.fresh import run_fresh
from tests.real.conftest import minilm_folder  # noqa: F401

#: 902 tokens with the special ones.
TEXT = " ".join(["the dog chased another dog across a field of wheat"] * 90)

FRESH = """
import json, sys, numpy as np
import hf_posenc
from sentence_transformers import CrossEncoder, SentenceTransformer
folder, text = sys.argv[1:]
encoder = SentenceTransformer(folder + "/encoder", device="cpu")
np.save(folder + "/again.npy", encoder.encode(text))
ranker = CrossEncoder(folder + "/ranker", device="cpu")
score = float(ranker.predict([("which dog ran?", text)])[0])
print("RESULTS " + json.dumps([encoder.max_seq_length, ranker.max_seq_length, score]))
"""


def mean_pooled(encoder: Any, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        mean = encoder[0].model(ids).last_hidden_state.mean(1)
    return torch.nn.functional.normalize(mean, dim=-1)[0].numpy()


@pytest.mark.long
def test_texts_past_the_native_length_are_read_whole(minilm_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    encoder = SentenceTransformer(str(minilm_folder), device="cpu")
    ids = encoder.tokenizer(TEXT, return_tensors="pt", truncation=False)["input_ids"]
    assert ids.shape == (1, 902)
    hf_posenc.patch_model(encoder[0].model, "alibi")
    hf_posenc.extend_context(encoder[0].model, encoder.tokenizer, length=1024)
    assert encoder.max_seq_length == 1024
    embedding = encoder.encode(TEXT)
    # The same weights on the same tokens, pooled in another order of float32 additions.
    assert np.abs(embedding - mean_pooled(encoder, ids)).max() <= 1e-5
    cut = torch.cat([ids[:, :511], ids[:, -1:]], dim=1)
    assert np.abs(embedding - mean_pooled(encoder, cut)).max() > 1e-3

    ranker = CrossEncoder(str(minilm_folder), num_labels=1, device="cpu")
    hf_posenc.patch_model(ranker[0].model, "alibi")
    hf_posenc.extend_context(ranker[0].model, ranker.tokenizer, length=1024)
    pairs = [("which dog ran?", TEXT), ("which dog ran?", TEXT.replace("wheat", "corn"))]
    score, other = (float(value) for value in ranker.predict(pairs))
    # What follows the 512th token counts: the two texts are the same up to there.
    late = TEXT[: TEXT.index("wheat", 2600)] + TEXT[TEXT.index("wheat", 2600) :].replace("wheat", "corn")
    assert float(ranker.predict([("which dog ran?", late)])[0]) not in (score, other)

    encoder.save(str(tmp_path / "encoder"))
    ranker.save(str(tmp_path / "ranker"))
    done = run_fresh(FRESH, tmp_path, TEXT)
    assert done.returncode == 0, done.stderr[-3000:]
    encoder_length, ranker_length, again = json.loads(done.stdout.split("RESULTS ")[1])
    assert (encoder_length, ranker_length) == (1024, 1024)
    assert np.array_equal(np.load(tmp_path / "again.npy"), embedding)
    assert again == score
