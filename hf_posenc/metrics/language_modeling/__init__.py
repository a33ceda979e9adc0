"""Loss and perplexity by length and by position, of causal and of masked language models."""

from hf_posenc.metrics.language_modeling.by_length import loss_by_length
from hf_posenc.metrics.language_modeling.of_text import text_losses
from hf_posenc.metrics.language_modeling.pieces import Frame
from hf_posenc.metrics.language_modeling.result import LengthLosses, LengthRow, SlidingLoss
from hf_posenc.metrics.language_modeling.sliding import sliding_window_loss
from hf_posenc.metrics.language_modeling.text import causal_targets, masked_targets, stream_windows, token_stream
from hf_posenc.metrics.language_modeling.token_losses import predicts_next_token, token_losses

__all__ = [
    "Frame",
    "LengthLosses",
    "LengthRow",
    "SlidingLoss",
    "causal_targets",
    "loss_by_length",
    "masked_targets",
    "predicts_next_token",
    "sliding_window_loss",
    "stream_windows",
    "text_losses",
    "token_losses",
    "token_stream",
]
