import dataclasses
import itertools
import math

import pytest
import torch

from hf_posenc import SequenceLengthError, UnsupportedError, patch_model
from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.language_modeling import (
    Frame,
    loss_by_length,
    masked_targets,
    predicts_next_token,
    stream_windows,
    text_losses,
    token_losses,
    token_stream,
)
from hf_posenc.metrics.language_modeling.by_length import scored_spans
from hf_posenc.metrics.language_modeling.token_losses import special_frame
from hf_posenc.plots.losses import plot_losses
from tests.metrics.conftest import TEXT, build
from tests.models import tiny

IGNORED = -100


def _text(windows=3, length=48, vocabulary=80):
    return torch.randint(4, vocabulary, (windows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def masked_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 80, "max_position_embeddings": 32, "initializer_range": 0.2}
    return tiny("BertForMaskedLM", hidden_dropout_prob=0.1, **sizes).train()


def _masked(ids, every=4, mask=1):
    labels = torch.full_like(ids, IGNORED)
    labels[:, ::every] = ids[:, ::every]
    shown = ids.clone()
    shown[:, ::every] = mask
    return shown, labels


def _plain_losses(model, ids):
    """The loss of transformers itself, one token at a time."""
    losses = torch.full(ids.shape, math.nan)
    for row, place in itertools.product(range(ids.shape[0]), range(1, ids.shape[1])):
        labels = torch.full_like(ids[:1], IGNORED)
        labels[0, place] = ids[row, place]
        with torch.no_grad():
            losses[row, place] = model(input_ids=ids[row : row + 1], labels=labels).loss
    return losses


def test_the_loss_at_every_token_is_that_of_transformers(tiny_llama):
    model, ids = tiny_llama(), _text(2, 12)
    expected = _plain_losses(model, ids)
    for tokens_per_batch in (1, 12, 1000):
        found = token_losses(model, ids, ids, tokens_per_batch=tokens_per_batch)
        # The same float32 sums, batched differently.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, equal_nan=True)


def test_a_masked_model_predicts_the_token_itself(masked_model):
    shown, labels = _masked(_text(2, 16))
    losses = token_losses(masked_model, shown, labels)
    assert masked_model.training  # as it was found
    masked_model.eval()
    with torch.no_grad():
        expected = masked_model(input_ids=shown, labels=labels).loss
    assert float(losses.nanmean()) == pytest.approx(float(expected), abs=1e-5)
    assert losses.isnan().equal(labels == IGNORED)


def test_who_predicts_what_is_measured(tiny_llama, masked_model):
    assert predicts_next_token(tiny_llama(), _text())
    assert not predicts_next_token(masked_model, _text())
    for scheme in ("none", "alibi", "rope"):
        assert predicts_next_token(patch_model(tiny_llama(), scheme), _text())
        assert not predicts_next_token(patch_model(masked_model, scheme), _text())


def test_every_length_reads_the_same_tokens_and_ends_on_the_same_targets(tiny_llama):
    model, ids = tiny_llama(), _text(3, 48)
    result = loss_by_length(model, ids, ids, [12, 48, 24], tail=8, position_bin=12)
    assert [row.length for row in result.rows] == [12, 24, 48]
    assert [row.targets for row in result.rows] == [3 * 48 // length * (length - 1) for length in (12, 24, 48)]
    assert result.position_edges == (0, 12, 24, 36, 48)
    whole = _plain_losses(model, ids)
    assert result.position_loss == pytest.approx(
        [float(whole[:, start : start + 12].nanmean()) for start in (0, 12, 24, 36)], abs=1e-5
    )


@pytest.mark.parametrize(
    ("window", "length", "frame"),
    [
        (48, 12, Frame()),
        (48, 48, Frame()),
        # A length that does not divide the window reads its start as a shorter piece; one token has no target.
        (48, 20, Frame()),
        (49, 24, Frame()),
        # Special tokens stand around every piece and are no targets.
        (46, 24, Frame((2,), (3,))),
    ],
)
def test_a_window_is_read_in_pieces_counted_from_its_end(tiny_llama, window, length, frame):
    model, ids = tiny_llama(), _text(2, window)
    row = loss_by_length(model, ids, ids, [length], tail=8, frame=frame).row(length)
    content = length - frame.size
    edges = [0, *range(window % content or content, window + 1, content)]
    losses = []
    for start, stop in itertools.pairwise(edges):
        piece = [torch.tensor([ends] * 2, dtype=torch.int64) for ends in (frame.before, frame.after)]
        framed = _plain_losses(model, torch.cat([piece[0], ids[:, start:stop], piece[1]], dim=1))
        losses.append(framed[:, len(frame.before) : framed.shape[1] - len(frame.after)])
    expected = torch.cat(losses, dim=1)
    assert row.targets == int((~expected.isnan()).sum())
    assert row.loss == pytest.approx(float(expected.nanmean()), abs=1e-5)
    assert row.tail_loss == pytest.approx(float(expected[:, -8:].mean()), abs=1e-5)
    assert row.perplexity == pytest.approx(math.exp(row.loss))


def test_short_lengths_need_no_tail_to_be_given(tiny_llama):
    model, ids = tiny_llama(), _text(2, 64)
    for lengths, tail in (([32, 64], 16), ([64], 32)):
        assert loss_by_length(model, ids, ids, lengths).rows == loss_by_length(model, ids, ids, lengths, tail=tail).rows


@pytest.mark.parametrize("scheme", ["native", "learned", "alibi"])
def test_a_length_without_positions_has_its_reason_and_the_others_their_loss(masked_model, scheme):
    if scheme != "native":
        patch_model(masked_model, scheme)
    shown, labels = _masked(_text(2, 64))
    result = loss_by_length(masked_model, shown, labels, [16, 32, 64], tail=8, position_bin=16, sliding_window=32)
    assert result.sliding.loss is not None
    ends = scheme != "alibi"
    assert [row.loss is None for row in result.rows] == [False, False, ends]
    assert [loss is None for loss in result.position_loss] == [False, False, ends, ends]
    if ends:
        assert "32 positions" in result.row(64).reason
        with pytest.raises(SequenceLengthError, match="32 positions"):
            token_losses(masked_model, shown, labels)


def _guide_loss(model, ids, window, stride):
    """The loop of the transformers guide, one text; every target's loss in the order of the text."""
    losses, previous_end = [], 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        fresh = end - previous_end
        losses.append(_plain_losses(model, ids[:, begin:end])[:, -fresh:])
        previous_end = end
        if end == ids.shape[1]:
            break
    return torch.cat(losses, dim=1)


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 4), (24, 24), (48, 5), (64, 7)])
def test_the_sliding_window_is_that_of_the_transformers_guide(tiny_llama, window, stride):
    model, ids = tiny_llama(), _text(2, 48)
    found = loss_by_length(model, ids, ids, [48], tail=8, sliding_window=window, stride=stride).sliding
    expected = torch.cat([_guide_loss(model, row, window, stride) for row in ids.split(1)])
    assert found.loss == pytest.approx(float(expected.nanmean()), abs=1e-5)
    assert found.tail_loss == pytest.approx(float(expected[:, -8:].nanmean()), abs=1e-5)
    assert found.targets == int((~expected.isnan()).sum())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("length", "window", "stride"), [(48, 16, 8), (50, 16, 7), (16, 16, 16), (17, 16, 1), (33, 8, 8)]
)
def test_sliding_windows_score_every_target_once(length, window, stride, causal):
    spans = scored_spans(length, window, stride, causal)
    assert [place for _, first, last in spans for place in range(first, last)] == list(range(length))
    for start, first, last in spans:
        assert start <= first
        assert last <= start + window <= length
        if causal and first:
            assert first - start >= window - stride
    # A model of both sides is scored around the middle of a window.
    assert scored_spans(32, 16, 8, causal=False) == [(0, 0, 12), (8, 12, 20), (16, 20, 32)]


def test_logits_that_are_no_numbers_are_said_not_averaged_over(tiny_llama):
    model, ids = tiny_llama(), _text(2, 24)
    with torch.no_grad():
        model.lm_head.weight[7] = math.nan
    losses = token_losses(model, ids, ids, True)
    assert losses[:, 1:].isinf().all()
    row = loss_by_length(model, ids, ids, [24], causal=True, tail=8).row(24)
    assert (row.loss, row.reason) == (None, "The loss is not a finite number.")
    with pytest.raises(MeasurementError, match="not finite"):
        loss_by_length(model, ids, ids, [24], tail=8)


IDS, LLAMA = _text(), "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("model", "ids", "labels", "options", "message"),
    [
        (LLAMA, IDS, IDS, {"lengths": []}, "at least one"),
        (LLAMA, IDS, IDS, {"lengths": [96]}, "do not fit windows of 48"),
        (LLAMA, IDS, IDS, {"lengths": [1]}, "do not fit"),
        (LLAMA, IDS, IDS, {"tail": 16}, "tail=16"),
        (LLAMA, IDS, IDS, {"tail": 0}, "tail=0"),
        (LLAMA, IDS, IDS, {"position_bin": 0}, "position_bin"),
        (LLAMA, IDS, IDS, {"tokens_per_batch": 0}, "tokens_per_batch"),
        (LLAMA, IDS, IDS, {"sliding_window": 16, "stride": 17}, "leaves tokens out"),
        (LLAMA, IDS, IDS, {"sliding_window": 1}, "leaves tokens out"),
        (LLAMA, IDS, torch.full_like(IDS, IGNORED), {}, "no target"),
        (LLAMA, IDS + 60, IDS, {}, "80 embeddings, for 0 to 79"),
        (LLAMA, IDS, IDS[:, :4], {}, "same"),
        ("T5ForConditionalGeneration", IDS, IDS, {}, "encoder-decoder"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, ids, labels, options, message):
    with pytest.raises((MeasurementError, UnsupportedError), match=message):
        loss_by_length(build(model), ids, labels, **{"lengths": [16], "tail": 4} | options)


def test_masks_are_fixed_by_the_seed_and_shown_as_the_mask_token():
    windows = _text(6, 200)
    shown, labels = masked_targets(windows, 1, probability=0.15, seed=3)
    chosen = labels != IGNORED
    # Six standard deviations of 1200 draws.
    assert abs(float(chosen.float().mean()) - 0.15) < 6 * math.sqrt(0.15 * 0.85 / 1200)
    assert (shown[chosen] == 1).all()
    assert labels[chosen].equal(windows[chosen])
    assert shown[~chosen].equal(windows[~chosen])
    assert masked_targets(windows[:2], 1, seed=3)[1].equal(labels[:2])
    assert not masked_targets(windows, 1, seed=4)[1].equal(labels)
    with pytest.raises(MeasurementError, match="between 0 and 1"):
        masked_targets(windows, 1, probability=1.0)


def test_windows_are_spread_over_the_stream_and_do_not_overlap():
    stream = torch.arange(100)
    windows = stream_windows(stream, 30)
    assert windows.shape == (3, 30)
    assert windows.flatten().unique().numel() == 90
    assert (windows[0, 0], windows[-1, -1]) == (0, 99)
    assert stream_windows(stream, 30, max_windows=1).tolist() == [list(range(30))]
    with pytest.raises(MeasurementError, match="100 tokens"):
        stream_windows(stream, 101)


def test_documents_are_closed_by_the_end_token_and_pieces_framed_by_special_ones(word_tokenizer, byte_tokenizer):
    assert special_frame(word_tokenizer, causal=False) == Frame((2,), (3,))
    assert special_frame(word_tokenizer, causal=True) == Frame((2,), ())
    assert special_frame(byte_tokenizer, causal=True) == Frame()
    word_tokenizer.eos_token = "[SEP]"
    assert token_stream(word_tokenizer, ["the dog", "a cat"]).tolist() == [4, 5, 3, 11, 8, 3]


def test_native_is_the_stock_model_and_no_scheme_is_the_one_in_force(tiny_llama, word_tokenizer):
    model = patch_model(tiny_llama(), "t5")
    result = text_losses(model, word_tokenizer, TEXT, [16, 32], ["native", "none", "learned"], special_tokens=False)
    stock = text_losses(tiny_llama(), word_tokenizer, TEXT, [16, 32], special_tokens=False)
    assert list(result.of("native")) == list(stock.of("native"))
    assert len({result.value(label, "loss", length=32) for label in result.labels}) == 3


def test_the_figure_needs_something_to_draw(tiny_llama, word_tokenizer, tmp_path):
    result = text_losses(tiny_llama(), word_tokenizer, TEXT, [16, 32], ["native", "none"], sliding_window=16)
    figure = plot_losses(result, tmp_path / "losses.svg")
    assert "position in pieces of 32 tokens" in (tmp_path / "losses.svg").read_text()
    first = figure.axes[0].get_lines()[0]
    assert first.get_ydata() == pytest.approx([record.value for record in result.of("native", "loss")])
    empty = dataclasses.replace(result, records=())
    with pytest.raises(ValueError, match="Nothing to plot"):
        plot_losses(empty)
