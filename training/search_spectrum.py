"""Searches for RoPE scaling factors for a longer context, without training, and saves a stock checkpoint.

python training/search_spectrum.py MODEL longer --length 12288 --text a.txt b.txt --held_out c.txt d.txt

The search reads the texts of --text. The table shows losses in nats per token on the texts of --held_out, which the
search does not read: for texts of the trained length, and for the tokens after that length in longer texts. It compares
the model's own RoPE, YaRN, and the factors found, which are saved if they are better than YaRN there. The table needs
memory for the logits of one whole text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, which has modules of common names

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from hf_posenc import RopeConfig, SchemeConfig, YarnScaling, export_model, patch_model
from hf_posenc.errors import PositionEncodingError, UsageError
from hf_posenc.loading import load_tokenizer
from hf_posenc.metrics.evaluation import config_in_force
from hf_posenc.metrics.language_modeling.token_losses import token_losses, token_stream
from hf_posenc.patching.place.lengths import update_tokenizer_length
from hf_posenc.recipes import SpectrumCandidate, SpectrumSearch, search_spectrum
from hf_posenc.report.tables import format_table
from training.errors import SettingsError, settings_errors
from training.one_run import exit_status


def windows_of(tokenizer: Any, paths: list[Path], length: int) -> Tensor:
    """Returns `(windows, length)` token ids: all full pieces of each text, from its beginning."""
    if length < 2:
        raise SettingsError(f"--length is {length}; it must be at least 2.")
    windows, longest = [], 0
    for path in paths:
        with settings_errors(f"{path} cannot be read as text", OSError, UnicodeDecodeError):
            stream = token_stream(tokenizer, [path.read_text(encoding="utf-8")])
        longest = max(longest, len(stream))
        windows += list(stream[: len(stream) // length * length].view(-1, length))
    if not windows:
        raise SettingsError(
            f"The longest of {', '.join(path.name for path in paths)} has {longest} tokens, but one window has "
            f"--length {length}. Give longer texts: pieces of several texts would not test a long context."
        )
    return torch.stack(windows)


def held_out_losses(model: Any, config: SchemeConfig, windows: Tensor, trained: int) -> Tensor:
    """Returns the mean losses of each window with a scheme in nats per token, `(windows, 2)`: of its beginning, read as
    a text of the trained length, and of the tokens after that length when it is read as a whole. The model keeps the
    scheme.
    """
    with warnings.catch_warnings():
        # The model runs without a cache here, and is saved as a stock checkpoint.
        warnings.filterwarnings("ignore", message=".*depends on the length of the sequence", category=UserWarning)
        patch_model(model, config)
    losses = []
    for window in windows.unsqueeze(1):
        texts = (window[:, :trained], window)
        within, whole = (token_losses(model, text, text, causal=True)[0].double() for text in texts)
        losses.append(torch.stack([within.nanmean(), whole[trained:].mean()]))
    return torch.stack(losses)


def compared(model: Any, search: SpectrumSearch, windows: Tensor, trained: int) -> dict[str, Tensor]:
    """Returns the losses of each window with the model's own RoPE, with YaRN, and with the factors found."""
    rope = config_in_force(model)
    assert isinstance(rope, RopeConfig)
    scaling = YarnScaling(factor=windows.shape[1] / trained, original_max_positions=trained)
    # The factor of the scheme itself takes precedence over that of the scaling.
    factor = None if rope.attention_scaling is None else rope.attention_scaling * scaling.attention_scaling()
    yarn = dataclasses.replace(rope, scaling=scaling, attention_scaling=factor)
    schemes = {"native": rope, "yarn": yarn, "found": search.config}
    return {name: held_out_losses(model, config, windows, trained) for name, config in schemes.items()}


def table(losses: dict[str, Tensor]) -> str:
    """Returns means over the windows, and how each scheme differs from YaRN after the trained length, per window."""
    rows = []
    for name, by_text in losses.items():
        (within, past), less_yarn = by_text.mean(dim=0).tolist(), (by_text - losses["yarn"])[:, 1]
        lower = f"{int((less_yarn < 0).sum())} of {len(less_yarn)}"
        rows.append([name, f"{within:.4f}", f"{past:.4f}", f"{float(less_yarn.mean()):+.4f}", lower])
    return format_table(["scheme", "at the trained length", "past it", "minus yarn", "below yarn"], rows)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a causal model with RoPE: hub id or local folder")
    parser.add_argument("output_dir", type=Path, help="folder for the stock checkpoint")
    parser.add_argument("--length", type=int, required=True, help="number of tokens that the model should read")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="texts for the search")
    parser.add_argument("--held_out", type=Path, nargs="+", required=True, metavar="FILE", help="texts for the table")
    parser.add_argument("--trained_length", type=int, help="length that it was trained on (default: from its config)")
    parser.add_argument("--evaluations", type=int, default=32, help="number of candidates (default: 32)")
    parser.add_argument("--needle_weight", type=float, default=0.5, help="weight of repeated spans (default: 0.5)")
    parser.add_argument("--device", default="cpu", help="device to run on (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="default: float32")
    parser.add_argument("--seed", type=int, default=0, help="seed of the search (default: 0)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 2 if the model or the texts cannot be used."""
    return exit_status("search_spectrum", lambda: _run(command_line().parse_args(arguments)), resumes=False)


def _run(options: argparse.Namespace) -> None:
    if options.output_dir.exists() and not (options.output_dir.is_dir() and not any(options.output_dir.iterdir())):
        raise SettingsError(f"{options.output_dir} is a file, or a folder that is not empty. Choose another one.")
    try:
        tokenizer = load_tokenizer(options.model)
        texts, held_out = (windows_of(tokenizer, paths, options.length) for paths in (options.text, options.held_out))
        if {tuple(text.tolist()) for text in texts} & {tuple(text.tolist()) for text in held_out}:
            raise SettingsError("--text and --held_out share a text, but the table must not use texts of the search.")
        # Loaded in its dtype: a cast would round the frequencies.
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
        with settings_errors(f"--device {options.device}", RuntimeError, AssertionError):
            model.to(options.device)
        stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        trained = options.trained_length or stated
        with tqdm(total=options.evaluations, unit="candidate") as progress:
            measured: list[float] = []

            def show(candidate: SpectrumCandidate) -> None:
                measured.append(candidate.loss)
                progress.set_postfix_str(f"YaRN {measured[0]:.4f}, lowest {min(measured):.4f}", refresh=False)
                progress.update()

            search = search_spectrum(
                model, texts, options.length, evaluations=options.evaluations, needle_weight=options.needle_weight,
                trained_length=options.trained_length, seed=options.seed, on_evaluation=show,
            )  # fmt: skip
        print(
            f"{len(texts)} texts of {options.length} tokens: the objective is {search.yarn.loss:.4f} with YaRN and "
            f"{search.best.loss:.4f} with the best of {len(search.losses)} candidates."
        )
        print(f"Found: {json.dumps(search.config.to_dict())}")
        assert trained is not None
        losses = compared(model, search, held_out, trained)
        print(table(losses))
        if losses["found"][:, 1].mean() >= losses["yarn"][:, 1].mean():
            raise SettingsError(
                "The factors found are not better than YaRN on the held-out texts, so nothing was saved. Search on "
                "more --text or with more --evaluations, or patch with NativeConfig(scaling=YarnScaling(...))."
            )
        update_tokenizer_length(tokenizer, model, stated)
        print(export_model(model, options.output_dir, tokenizer=tokenizer))
    except (PositionEncodingError, UsageError, ValueError, OSError) as error:
        raise SettingsError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
