"""Stock checkpoints, for schemes that stock transformers can express with its config and weights."""

from __future__ import annotations

import copy
import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.checkpoint.atomic_folder import atomic_replacement
from hf_posenc.checkpoint.stock_form import stock_form
from hf_posenc.entry import read_entry
from hf_posenc.errors import SequenceLengthError, UnsupportedError
from hf_posenc.patching.place.in_force import current_encoding

#: Maximum difference at which two models count as equal, in float32; relative for outputs larger than 1.
TOLERANCE = 1e-5
_SHORT = 48
_LONGEST = 8192


def save_stock_checkpoint(model: PreTrainedModel, directory: str | os.PathLike[str], **save_kwargs: Any) -> None:
    """Saves a patched model as a checkpoint that needs only transformers (or vLLM, llama.cpp, ...).

    The checkpoint is loaded with stock code and must give the same outputs as `model` on random tokens, also beyond a
    sliding window and beyond the original length of a RoPE scaling. `directory` is created only after this check.

    Args:
        model: a patched model. An unpatched model is saved unchanged.
        directory: a new folder, or a folder without a model.
        save_kwargs: additional arguments of `save_pretrained`, such as `max_shard_size`.

    Raises:
        UnsupportedError: if stock transformers cannot express the scheme on this architecture; gives the difference.
        FileExistsError: if the folder already contains a model.
        TypeError: for something that is not a transformers model, such as a PEFT wrapper.
    """
    target = Path(directory)
    _check_arguments(model, target, save_kwargs)
    # Raises for a partly patched model, and for a model patched by another copy of the package.
    current_encoding(model)
    if read_entry(model.config) is None:
        model.save_pretrained(target, **save_kwargs)
        return
    config, state = stock_form(model)
    with atomic_replacement(target) as draft:
        _write(model, config, state, draft, save_kwargs)
        _verify(model, draft, save_kwargs.get("variant"))


def _check_arguments(model: Any, target: Path, save_kwargs: dict[str, Any]) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"save_stock_checkpoint needs a transformers model, got {type(model).__name__}. For a PEFT model, pass "
            "model.merge_and_unload()."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} is quantised ({model.hf_quantizer.quantization_config.quant_method}), so its "
            "weights cannot be compared in float32. Export the unquantised model and quantise the result."
        )
    for option in ("push_to_hub", "state_dict"):
        if save_kwargs.get(option):
            raise ValueError(
                f"save_stock_checkpoint does not accept {option}=, because it checks the checkpoint before publishing "
                "it. Save first, then load the folder with from_pretrained and push that model."
            )
    if target.exists() and (not target.is_dir() or any(_is_model_file(path) for path in target.iterdir())):
        raise FileExistsError(f"{target} already contains a model (or is a file). Give a new folder.")


def _is_model_file(path: Path) -> bool:
    return path.name == "config.json" or path.suffix in (".safetensors", ".bin")


def _write(
    model: PreTrainedModel, config: Any, state: dict[str, Tensor], draft: Path, save_kwargs: dict[str, Any]
) -> None:
    """Calls `save_pretrained` of a stock model without weights in memory."""
    with torch.device("meta"):
        stock = type(model)(config)
    stock.to(model.dtype)
    if model.can_generate():
        stock.generation_config = copy.deepcopy(model.generation_config)
    stock.save_pretrained(draft, state_dict=state, **save_kwargs)


@torch.no_grad()
def _verify(model: PreTrainedModel, draft: Path, variant: str | None) -> None:
    scheme = model.position_encoding.config.name
    reference = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    stock, info = type(model).from_pretrained(draft, dtype=torch.float32, variant=variant, output_loading_info=True)
    stock.to(model.device)
    stray = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]]))
    if stray:
        raise UnsupportedError(
            f"A stock {type(model).__name__} does not have the same weights: {', '.join(stray[:5])}."
        )
    training = model.training
    reference.eval()
    try:
        for start, stop in _spans(model):
            difference = _difference(reference, stock, start, stop)
            if not difference <= TOLERANCE:
                raise UnsupportedError(
                    f"The scheme {scheme!r} cannot be expressed by a stock {type(model).__name__}: its outputs would "
                    f"differ by {difference:.3g} on random tokens at the positions {start} to {stop - 1} (allowed: "
                    f"{TOLERANCE}). Use model.save_pretrained, and `import hf_posenc` where the checkpoint is loaded."
                )
    finally:
        model.train(training)


def _spans(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Returns the positions to compare at, as the first one and the one after the last: a short sequence, one that is
    longer than a sliding window, and one beyond the original length of a scaling.
    """
    config = model.config.get_text_config()
    windows = [getattr(config, "sliding_window", None), getattr(config, "local_attention", None)]
    ends = [_SHORT, *(window + 16 for window in windows if isinstance(window, int))]
    limit = model.position_encoding.lengths.reach.length
    spans = {(0, min(end, limit or _LONGEST, _LONGEST)) for end in ends}
    original = getattr(getattr(model.position_encoding.config, "scaling", None), "original_max_positions", None)
    if isinstance(original, int):
        # A scaling depends on the largest position, so a few tokens there are enough. Not all models take positions.
        if "position_ids" in inspect.signature(model.forward).parameters:
            end = min(2 * original, limit or 2 * original)
            spans.add((max(0, end - _SHORT), end))
        else:
            spans.add((0, min(original + 16, limit or _LONGEST, _LONGEST)))
    return sorted(spans)


def _difference(reference: PreTrainedModel, stock: PreTrainedModel, start: int, stop: int) -> float:
    ids = _random_ids(reference, stop - start)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": False}
    if reference.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    if start > 0:
        arguments["position_ids"] = torch.arange(start, stop, device=ids.device).unsqueeze(0)
    try:
        expected = reference(**arguments)[0]
    except SequenceLengthError:
        # The table is shorter than the shortest comparison, so compare at a smaller length.
        return _difference(reference, stock, start, start + (stop - start) // 2)
    try:
        found = stock(**arguments)[0]
    except IndexError:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def _random_ids(model: PreTrainedModel, length: int) -> Tensor:
    config = model.config.get_text_config()
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    # Some architectures derive positions from padding tokens in the input.
    ordinary = torch.tensor([token for token in range(min(config.vocab_size, _LONGEST)) if token not in special])
    picks = torch.randint(0, len(ordinary), (1, length), generator=torch.Generator().manual_seed(0))
    return ordinary[picks].to(model.device)
