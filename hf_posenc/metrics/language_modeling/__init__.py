"""Loss and perplexity of causal and masked language models, by length and by position."""

from hf_posenc.metrics.forward import predicts_next_token
from hf_posenc.metrics.language_modeling.by_length import (
    LengthLosses,
    LengthRow,
    loss_by_length,
    text_losses,
)
from hf_posenc.metrics.language_modeling.token_losses import (
    Frame,
    causal_targets,
    masked_targets,
    special_frame,
    stream_windows,
    token_losses,
    token_stream,
)

__all__ = [
    "Frame", "LengthLosses", "LengthRow", "causal_targets", "loss_by_length", "masked_targets", "predicts_next_token",
    "special_frame", "stream_windows", "text_losses", "token_losses", "token_stream",
]  # fmt: skip
