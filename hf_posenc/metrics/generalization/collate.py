"""Batches of examples for an encoder-decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_posenc.metrics.generalization.encoding import IGNORED


class EncoderDecoderCollator:
    """Makes batches of `SyntheticExamples` for an encoder-decoder: its encoder reads prompts, its decoder answers.

    Args:
        decoder_start_token_id: what the decoder starts with; `model.config.decoder_start_token_id`.
        pad_token_id: fills rows, masked and without a label.
    """

    def __init__(self, decoder_start_token_id: int, pad_token_id: int) -> None:
        self.decoder_start_token_id = decoder_start_token_id
        self.pad_token_id = pad_token_id

    def __call__(self, items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of items with `input_ids`, `attention_mask` and `labels`, `(row_length,)` each.

        Returns:
            `input_ids` and `attention_mask`, `(batch, longest_prompt)`, and `decoder_input_ids` and `labels`,
            `(batch, longest_answer)`. The label of a place in the decoder is the token that it has to write there.
        """
        prompts, answers = [], []
        for item in items:
            in_answer = item["labels"] != IGNORED
            prompts.append(item["input_ids"][item["attention_mask"].bool() & ~in_answer])
            answers.append(item["labels"][in_answer])
        start = torch.tensor([self.decoder_start_token_id])
        read = [torch.cat([start, answer[:-1]]) for answer in answers]
        return {
            "input_ids": pad_sequence(prompts, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True),
            "decoder_input_ids": pad_sequence(read, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(answers, batch_first=True, padding_value=IGNORED),
        }
