"""How other code uses a cache of a patched model: walking its attributes, copying, pickling, exporting."""

from __future__ import annotations

import copy
import copyreg
import gc
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from hf_posenc import UnsupportedError, patch_model
from hf_posenc.patching.call.cache import _table
from tests.kits.decoding import decoded
from tests.models import tiny
from tests.versions import before

IDS = torch.arange(1, 13)[None]
GAPPED = torch.tensor([[0, 1, 2, 3, 40, 41, 42, 43, 90, 91, 92, 93]])


class EqualCache(DynamicCache):
    """A cache of a user: instances are equal, so they cannot be keys of a dictionary."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualCache)


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=16),
    "quantized": lambda config: QuantizedCache("hqq", config, nbits=8, q_group_size=16, axis_key=1, axis_value=1),
    "equal": lambda config: EqualCache(config=config),
}


def _loaded(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache, protocol=4)),
    "old pickle": lambda cache: pickle._loads(pickle._dumps(cache, protocol=0)),  # type: ignore[attr-defined]
    "to another process": lambda cache: pickle.loads(ForkingPickler.dumps(cache)),
    "torch.save": _loaded,
    "in a list": lambda cache: copy.deepcopy([cache, 1])[0],
    "copy of a copy": lambda cache: copy.deepcopy(copy.deepcopy(cache)),
}


def made(scheme: str | None = "alibi") -> Any:
    model = tiny("LlamaForCausalLM").eval()
    return model if scheme is None else patch_model(model, scheme)


def filled(model: Any, kind: str = "dynamic", **options: Any) -> Any:
    cache = CACHES[kind](model.config)
    decoded(model, IDS, cache, [7, 1], **options)
    return cache


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("scheme", ["alibi", "t5", "rope"])
def test_a_cache_has_the_attributes_that_the_stock_model_leaves_on_it(kind: str, scheme: str) -> None:
    utils = pytest.importorskip("transformers.exporters.utils")
    if kind == "quantized":
        pytest.importorskip("hqq", reason="hqq is not installed")
    found, stock = filled(made(scheme), kind), filled(made(None), kind)
    assert vars(found).keys() == vars(stock).keys()
    assert utils.get_leaf_tensors(found).keys() == utils.get_leaf_tensors(stock).keys()
    assert vars(copy.deepcopy(stock)).keys() == vars(stock).keys()
    assert b"hf_posenc" not in pickle.dumps(stock)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["dynamic", "equal"])
@torch.no_grad()
def test_a_copy_continues_and_keeps_its_scheme_and_positions(kind: str, how: str) -> None:
    model = made()
    expected = model(IDS, position_ids=GAPPED).logits[:, 8:]
    twin = COPIES[how](filled(model, kind, position_ids=GAPPED))
    found = model(IDS[:, 8:], position_ids=GAPPED[:, 8:], past_key_values=twin).logits
    # The sums of attention over cached keys are computed in another order, in float32.
    assert (found - expected).abs().max() < 1e-4
    with pytest.raises(UnsupportedError, match="encoded with 'alibi'"):
        made("t5")(IDS[:, 8:], past_key_values=COPIES[how](filled(model, kind)))


def test_a_reducer_that_someone_registered_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registered(DynamicCache):
        pass

    def rebuilt(name: str, state: dict[str, Any]) -> Any:
        cache = Registered()
        vars(cache).update(state, came_from=name)
        return cache

    copyreg.pickle(Registered, lambda cache: (rebuilt, ("mine", vars(cache))))
    monkeypatch.setitem(CACHES, "registered", lambda config: Registered(config=config))
    model = made()
    twin = copy.deepcopy(filled(model, "registered"))
    assert twin.came_from == "mine"
    with pytest.raises(UnsupportedError, match="encoded with 'alibi'"):
        made("t5")(IDS[:, 8:], past_key_values=twin)


def test_notes_end_with_their_cache() -> None:
    gc.collect()
    before = len(_table)
    caches = [filled(made(), kind, position_ids=GAPPED) for kind in ("dynamic", "equal")]
    caches += [copy.deepcopy(cache) for cache in caches]
    assert len(_table) == before + 4
    del caches
    gc.collect()
    assert len(_table) == before


@pytest.mark.long
@torch.no_grad()
def test_transformers_exports_prefill_and_decoding() -> None:
    exporters = pytest.importorskip("transformers.exporters")
    config = pytest.importorskip("transformers.exporters.configs").DynamoConfig(dynamic=True)
    model = made("t5")
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    exported = exporters.DynamoExporter().export_for_generation(model, inputs, config)
    # Before transformers 5.23 the programs are returned alone, and take a mask.
    decode = exported["decode"] if before("5.23") else exported.components["decode"].program
    names = set(decode.call_spec.in_spec.child(1).context)
    cache, twin = filled(model), filled(model)
    (name,) = {"cache", "past_key_values"} & names
    step = {"input_ids": IDS[:, 8:9], "position_ids": torch.tensor([[8]])}
    mask = {"attention_mask": torch.ones_like(IDS[:, :9])} if "attention_mask" in names else {}
    found = decode.module()(**step, **mask, **{name: cache}).logits
    expected = model(**step, past_key_values=twin).logits
    assert (found - expected).abs().max() < 1e-4
