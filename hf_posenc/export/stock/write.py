"""The target "stock": a checkpoint that needs only transformers."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections import defaultdict
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.records import Check, Written
from hf_posenc.export.refusal import ExportError
from hf_posenc.export.request import Request
from hf_posenc.export.stock.carriers import CARRIERS, Carrier
from hf_posenc.export.stock.form import StockForm, check_config
from hf_posenc.export.stock.verify import TOLERANCE, Comparison, comparisons
from hf_posenc.patching.place.encoding import current_encoding


def write(request: Request, *, max_shard_size: int | str | None = None, variant: str | None = None) -> Written:
    """Writes a plain transformers checkpoint.

    The carriers are tried in order. A checkpoint is loaded with stock code and must give the same outputs as the model
    on random tokens, also beyond a sliding window and beyond the original length of a RoPE scaling.

    Args:
        request: the model and where to write it.
        max_shard_size: as in `save_pretrained`.
        variant: as in `save_pretrained`.

    Raises:
        UnsupportedError: if no carrier can express the scheme, with the reason of each.
    """
    given = {"max_shard_size": max_shard_size, "variant": variant}
    save_kwargs = {name: value for name, value in given.items() if value is not None}
    reasons, inexact = defaultdict(list), []
    for carrier in _carriers(request.model):
        try:
            form = _form(carrier, request.model)
            _save(request, form, save_kwargs)
            found = comparisons(request.model, form.model_class, request.draft, variant)
        except UnsupportedError as error:
            reasons[str(error)].append(carrier.name)
            continue
        if all(one.equal for one in found) and not form.restriction:
            return _written(form, found, TOLERANCE)
        inexact.append((form, found))
        if form.restriction:
            reasons[form.restriction].append(carrier.name)
            continue
        wrong = next(one for one in found if not one.equal)
        reasons[f"the outputs of {form.carrier} would differ by {wrong}"].append(carrier.name)
    if request.approximate and inexact:
        form, found = min(inexact, key=lambda pair: max(one.difference for one in pair[1]))
        _save(request, form, save_kwargs)
        return _written(form, found, None)
    raise ExportError(request, "stock", "Plain transformers", reasons, bool(inexact))


def proposal(model: PreTrainedModel) -> str | None:
    """What could carry a model's scheme, before it is run; `None` if nothing could."""
    for carrier in _carriers(model):
        with contextlib.suppress(UnsupportedError):
            form = _form(carrier, model)
            if not form.restriction:
                return form.carrier
    return None


def _form(carrier: Carrier, model: PreTrainedModel) -> StockForm:
    form = carrier.form(model)
    check_config(form.config)
    return form


def _carriers(model: PreTrainedModel) -> list[Carrier]:
    """The carriers to try. A model without a scheme of this package needs no other class than its own."""
    carriers = CARRIERS[:1] if current_encoding(model) is None else CARRIERS
    return [carrier for carrier in carriers if carrier.fits(model)]


def _save(request: Request, form: StockForm, save_kwargs: dict[str, Any]) -> None:
    """Calls `save_pretrained` of a stock model without weights in memory."""
    for path in request.draft.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with torch.device("meta"):
        stock = form.model_class(form.config)
    stock.to(request.model.dtype)
    if request.model.can_generate():
        stock.generation_config = copy.deepcopy(request.model.generation_config)
    stock.save_pretrained(request.draft, state_dict=form.state, **save_kwargs)


def _written(form: StockForm, found: list[Comparison], allowed: float | None) -> Written:
    checks = [
        Check(f"transformers {transformers.__version__}", mode, "outputs", max(differences), allowed)
        for mode in ("prefill", "decode")
        if (differences := [one.difference for one in found if one.mode == mode])
    ]
    name = form.model_class.__name__
    usage = f'```python\nfrom transformers import {name}\n\nmodel = {name}.from_pretrained("{{folder}}")\n```'
    return Written(form.carrier, tuple(checks), usage)
