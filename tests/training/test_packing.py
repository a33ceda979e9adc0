"""Rows from documents: what is in them, what is a target, and that documents of a row do not see each other."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer, set_seed

from hf_posenc import patch_model
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import patched
from tests.models import tiny
from training.data.blocking import Batches, find_batches
from training.data.order import EpochOrder
from training.data.text import PackedRows, RowMasking, TokenStream, tokenize
from training.errors import SettingsError
from training.objectives import summed_cross_entropy, target_count

#: Documents of 3, 1, 7, 1, 1 and 9 tokens.
DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16], [17], [18, 19, 20, 21, 22, 23, 24, 25, 26]]
VOCABULARY = 32


def stream(documents: list[list[int]] = DOCUMENTS) -> TokenStream:
    return TokenStream.of_documents(datasets.Dataset.from_dict({"input_ids": documents}))


def rows(packing: str = "documents", block_size: int = 6) -> PackedRows:
    return PackedRows(stream(), block_size, packing, masking=None)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_stream_reads_any_stretch(chunked: bool) -> None:
    parts = [datasets.Dataset.from_dict({"input_ids": DOCUMENTS[cut]}) for cut in (slice(0, 2), slice(2, 6))]
    kept = TokenStream.of_documents(datasets.concatenate_datasets(parts)) if chunked else stream()
    flat = [token for document in DOCUMENTS for token in document]
    assert len(kept) == len(flat) == 22
    assert kept.documents == 6
    for start in range(22):
        for stop in range(start + 1, 23):
            tokens, places = kept.read(start, stop)
            assert tokens.tolist() == flat[start:stop]
            expected: list[int] = []
            for document in DOCUMENTS:
                inside = [token for token in document if token in flat[start:stop]]
                expected += range(len(inside))
            assert places.tolist() == expected
    assert kept.digest() == stream().digest()
    assert kept.digest() != stream([[*DOCUMENTS[0], 8], *DOCUMENTS[2:]]).digest()


def test_a_selection_of_documents_is_read_in_its_order() -> None:
    chosen = datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).select([2, 0])
    assert TokenStream.of_documents(chosen).read(0, 10)[0].tolist() == [*DOCUMENTS[2], *DOCUMENTS[0]]


def test_rows_of_packed_and_of_concatenated_documents() -> None:
    """The first token of a document, and of a row, has no context and is no target."""
    packed, joined = rows(), rows("concatenate")
    assert len(packed) == len(joined) == 3
    assert packed[0]["input_ids"].tolist() == joined[0]["input_ids"].tolist() == [5, 6, 7, 8, 9, 10]
    assert packed[0]["places"].tolist() == [0, 1, 2, 0, 0, 1]
    assert packed[1]["places"].tolist() == [0, 1, 2, 3, 4, 0]
    assert joined[0]["places"].tolist() == [0, 1, 2, 3, 4, 5]
    assert packed[0]["labels"].tolist() == [-100, 6, 7, -100, -100, 10]
    assert joined[0]["labels"].tolist() == [-100, 6, 7, 8, 9, 10]
    with pytest.raises(SettingsError, match=r"22 tokens in 6 document.*needs 23.*--block_size"):
        rows(block_size=23)


def test_tokenising_drops_blanks_and_closes_documents() -> None:
    def tokenized(*texts: Any) -> Any:
        return tokenize(datasets.Dataset.from_dict({"body": texts}), "body", ByT5Tokenizer())

    assert tokenized("ab", "  ", None, "c")["input_ids"] == [[100, 101, 1], [102, 1]]
    with pytest.raises(SettingsError, match="'body' contains int, not text"):
        tokenized(1, 2)
    with pytest.raises(SettingsError, match="0 tokens in 0 document"):
        PackedRows(TokenStream.of_documents(tokenized(" ")), 4, "documents", None)


# Order and masks


def test_an_order_is_whole_batches_that_differ_by_epoch() -> None:
    order = EpochOrder(11, multiple=4, seed=3)
    first = list(order)
    order.set_epoch(1)
    second = list(order)
    assert len(order) == len(first) == 8
    assert {epoch for epoch, _ in first} == {0}
    assert {epoch for epoch, _ in second} == {1}
    assert len({row for _, row in first}) == 8
    assert [row for _, row in first] != [row for _, row in second]
    assert first == list(EpochOrder(11, multiple=4, seed=3))
    assert first != list(EpochOrder(11, multiple=4, seed=4))
    assert [row for _, row in EpochOrder(11, 4, 3, shuffle=False)] == list(range(8))


def masking(seed: int = 0, stream: int = 0) -> RowMasking:
    tokenizer = ByT5Tokenizer()
    tokenizer.mask_token = "<extra_id_0>"
    return RowMasking(tokenizer, 0.15, seed, stream)


def test_masks_depend_on_seed_epoch_and_row_alone() -> None:
    tokens = torch.arange(3, 203)
    make = masking()
    first = make(tokens, epoch=0, row=7)
    torch.manual_seed(1)
    np.random.default_rng(1)
    make(tokens, epoch=5, row=1)
    again = masking()(tokens, epoch=0, row=7)
    assert all(torch.equal(left, right) for left, right in zip(first, again, strict=True))
    others = [make(tokens, 1, 7), make(tokens, 0, 8), masking(1)(tokens, 0, 7), masking(0, 1)(tokens, 0, 7)]
    assert all(not torch.equal(first[1], right[1]) for right in others)


def test_masks_are_those_of_bert() -> None:
    tokens = torch.full((100_000,), 70)
    tokens[::10] = 1  # the end token
    inputs, labels = masking()(tokens, 0, 0)
    targets = labels != -100
    assert not targets[::10].any()
    shown = inputs[targets]
    mask = ByT5Tokenizer().convert_tokens_to_ids("<extra_id_0>")
    # 13,500 targets: three standard deviations of their share are 0.01.
    assert targets.sum() / 90_000 == pytest.approx(0.15, abs=0.01)
    assert (shown == mask).float().mean() == pytest.approx(0.8, abs=0.01)
    assert (shown == 70).float().mean() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(inputs[~targets], tokens[~targets])
    assert torch.equal(labels[targets], tokens[targets])


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"ByT5Tokenizer has no mask token.*--tokenizer_name"):
        RowMasking(ByT5Tokenizer(), 0.15, 0)


# Documents in one row


def model_of(causal: bool, scheme: Any, attention: str = "sdpa") -> Any:
    set_seed(0)
    options = {"initializer_range": 0.2, "num_key_value_heads": 4, "use_cache": False, "attn_implementation": attention}
    model = tiny("LlamaForCausalLM" if causal else "BertForMaskedLM", vocab_size=VOCABULARY, **options)
    return model.eval() if scheme is None else patch_model(model, scheme).eval()


SCHEMES = [None, "alibi", "rope", "t5", {"scheme": "learned", "num_positions": 64}, "none", ["native", "kerple"]]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["llama", "bert"])
@torch.no_grad()
def test_the_loss_of_packed_documents_is_that_of_separate_ones(causal: bool, scheme: Any) -> None:
    # Every scheme runs both ways of attention, in one of the two models each.
    model = model_of(causal, scheme, "sdpa" if causal == bool(SCHEMES.index(scheme) % 2) else "eager")
    block_size = 11
    batches = find_batches(model, block_size, causal, VOCABULARY)
    packed = PackedRows(stream(), block_size, "documents", masking=None)
    batch = batches([packed[0], packed[1]])
    if not causal:  # every token a target, for a test of all of them
        batch["labels"] = batch["input_ids"].clone()
    labels = batch.pop("labels")
    together = summed_cross_entropy(model(**batch).logits, labels, causal)
    alone, count = torch.tensor(0.0), 0
    flat = [token for document in DOCUMENTS for token in document]
    for row in range(2):
        for document in DOCUMENTS:
            kept = [token for token in document if token in flat[row * block_size : (row + 1) * block_size]]
            if kept:
                tokens = torch.tensor([kept])
                targets = tokens.masked_fill(torch.arange(len(kept)) == 0, -100) if causal else tokens
                alone += summed_cross_entropy(model(input_ids=tokens).logits, targets, causal)
                count += int(target_count(targets, causal))
    assert int(target_count(labels, causal)) == count > 10
    assert float(together) == pytest.approx(float(alone), rel=1e-5)  # fp32 sums in another order
    naive = summed_cross_entropy(model(input_ids=batch["input_ids"]).logits, labels, causal)
    assert abs(float(naive) - float(alone)) > 1e-3 * float(alone)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama_gqa", Batches()),
        ("mistral_sliding", Batches()),
        ("opt", Batches(mask=True)),
        ("bert", Batches(mask=True, causal=False)),
        ("roberta", Batches(mask=True, first_position=2, causal=False)),
    ],
)
def test_each_architecture_is_told_in_its_own_way(architecture: str, expected: Batches) -> None:
    model = patched(architecture, None).train()
    assert find_batches(model, 24, ARCHITECTURES[architecture].causal, 50) == expected
    assert model.training


@pytest.mark.parametrize("architecture", ["bloom", "modernbert"])
def test_where_documents_cannot_be_kept_apart_the_run_is_refused(architecture: str) -> None:
    model = patched(architecture, None)
    with pytest.raises(SettingsError, match=r"cannot separate documents.*--packing concatenate"):
        find_batches(model, 24, ARCHITECTURES[architecture].causal, 50)


def test_attention_without_effect_cannot_be_checked() -> None:
    model = model_of(True, None)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    with pytest.raises(SettingsError, match="no effect yet"):
        find_batches(model, 12, True, VOCABULARY)
