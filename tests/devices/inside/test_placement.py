"""Every scheme in models whose layers are on one device or spread: outputs, gradients, loading, undoing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_posenc import PositionEncodingError, extend_context, inspect_model, native_scheme, patch_model, unpatch_model
from tests.attention.block_sizes import set_sizes
from tests.devices import spreading
from tests.devices.inside.subjects import SCHEMES, SUBJECTS
from tests.kits.decoding import decoded, left_padding
from tests.matrix.running import LENGTH, tokens
from tests.thinning import mostly_slow

#: Relative, of float32. The layers round alike on every device, but the CPU's own kernels add in another order.
CLOSE = 2e-5
_FIRST, _SECOND = spreading.first(), spreading.second("split")
#: The others load as Llama does.
LOADED = ("none", "t5", "alibi", "rope", "learned", "sinusoidal", "forget_gate", "fire", "cope", "composed")


def built(subject: str, scheme: str) -> Any:
    """The patched model on the CPU."""
    try:
        return SUBJECTS[subject].model(scheme)
    except (PositionEncodingError, ValueError) as refused:
        pytest.skip(str(refused)[:100])


def stock_model(subject: str) -> Any:
    """The model without a patch on the CPU; the same weights as those of a patched one."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        return SUBJECTS[subject].build().eval()


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= CLOSE * wanted.abs().max().clamp(min=1.0))


def gradients(model: Any, output: Tensor) -> dict[str, Tensor]:
    """Of all parameters, for a fixed function of the output."""
    weights = torch.randn(output.shape[-1], generator=torch.Generator("cpu").manual_seed(3), device="cpu")
    (output.double() * weights).mean().backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: one.grad.cpu() for name, one in named.items() if one.grad is not None}


def _by_default(cell: tuple[str, str]) -> bool:
    """Two subjects for each scheme."""
    subject, scheme = cell
    return (list(SUBJECTS).index(subject) - list(SCHEMES).index(scheme)) % 5 == 0


@pytest.mark.parametrize(("subject", "scheme"), mostly_slow(itertools.product(SUBJECTS, SCHEMES), _by_default))
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_outputs_and_gradients_are_those_of_the_cpu(subject: str, scheme: str, checkpointed: bool) -> None:
    model, reference = built(subject, scheme), built(subject, scheme)
    if checkpointed and (subject == "vit" or spreading.placement in ("cpu", "disk")):
        pytest.skip("accelerate's offloading and checkpointing do not go together, in stock models either")
    try:
        wanted = SUBJECTS[subject].outputs(reference, "cpu")
    except PositionEncodingError as refused:
        pytest.skip(str(refused)[:100])
    model = spreading.spread(model.to(_FIRST))
    if checkpointed:
        model.train()
        model.gradient_checkpointing_enable()
        _without_dropout(model)
        if scheme == "randomized":
            pytest.skip("draws positions in training")
    _compare(model, reference, SUBJECTS[subject].outputs(model, _FIRST), wanted)


@pytest.mark.parametrize("divided", [False, True], ids=["", "divided"])
@pytest.mark.parametrize(
    ("subject", "scheme"), mostly_slow(itertools.product(("llama", "bert"), SCHEMES), lambda cell: cell[0] == "llama")
)
def test_gradients_with_sdpa_are_those_of_the_cpu(
    subject: str, scheme: str, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels for short inputs and, in blocks, with those for long ones."""
    if divided:
        set_sizes(monkeypatch, short_pairs=0, shared_numbers=0, distance_rows=5, term_rows=5, backward_rows=6)
    model, reference = built(subject, scheme), built(subject, scheme)
    with torch.device("cpu"):
        ids = {"input_ids": tokens()}
    wanted = reference(**ids).logits
    model = spreading.spread(model.to(_FIRST))
    model.set_attn_implementation("sdpa")
    _compare(model, reference, model(input_ids=ids["input_ids"].to(_FIRST)).logits.cpu(), wanted)


def _compare(model: Any, reference: Any, found: Tensor, wanted: Tensor) -> None:
    """Outputs, and gradients where accelerate computes them."""
    assert close(found, wanted)
    if spreading.placement in ("cpu", "disk"):
        return
    expected, own = gradients(reference, wanted), gradients(model, found)
    assert own.keys() <= expected.keys()
    size = max(one.abs().max() for one in expected.values())
    # accelerate unties weights of a model that it spreads, stock models included. Their gradients add up.
    parameters = dict(reference.named_parameters(remove_duplicate=False))
    tied = {name: [other for other in own if parameters[other] is parameters[name]] for name in expected}
    separate = dict(model.named_parameters())
    for name, one in expected.items():
        total = sum(own[other] for other in tied[name] if other in separate)
        assert (total - one).abs().max() <= 10 * CLOSE * size, name


def _without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@pytest.mark.parametrize("scheme", LOADED)
@pytest.mark.parametrize("subject", ["llama", "bert", "t5", "llava"])
@torch.no_grad()
def test_a_device_map_of_the_stock_model_loads_and_dispatches_a_patched_one(
    subject: str, scheme: str, tmp_path: Path
) -> None:
    model, placement = built(subject, scheme), spreading.placement
    if placement == "disk":
        pytest.skip(
            "safetensors cannot read to this device, and a stock BERT gets wrong weights from disk in half of runs"
        )
    wanted = SUBJECTS[subject].outputs(model, "cpu")
    stock = stock_model(subject)
    device_map = {"": _FIRST} if placement == "one" else spreading.device_map(stock, placement)
    assert not any("position_encoding" in name for name in device_map)
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved", device_map=device_map, attn_implementation="eager")
    _check(loaded.eval(), subject, scheme, wanted, tmp_path)
    if placement != "one":
        dispatched = dispatch_model(model, device_map, main_device=_FIRST, offload_dir=tmp_path / "offload")
        _check(dispatched, subject, scheme, wanted, tmp_path)


def _check(model: PreTrainedModel, subject: str, scheme: str, wanted: Tensor, folder: Path) -> None:
    """Right, saved as it is, its parts where they are used, and stock after unpatching."""
    assert close(SUBJECTS[subject].outputs(model, _FIRST), wanted)
    assert not any("_hf_hook" in one.__dict__ for one in model.base_model.position_encoding.modules())
    assert not any(one.is_meta for one in model.base_model.position_encoding.parameters())
    model.save_pretrained(folder / "again")
    with torch.device("cpu"):
        again = type(model).from_pretrained(folder / "again", attn_implementation="eager").eval()
        assert close(SUBJECTS[subject].outputs(again, "cpu"), wanted)
        stock = SUBJECTS[subject].outputs(stock_model(subject), "cpu")
    inspect_model(model)
    unpatch_model(model)
    assert close(SUBJECTS[subject].outputs(model, _FIRST), stock)


@pytest.mark.parametrize("scheme", ["t5", "alibi", "kerple", "fire", "composed"])
@pytest.mark.parametrize("subject", ["llama", "bert"])
@torch.no_grad()
def test_masks_with_gaps_give_what_they_give_on_the_cpu(subject: str, scheme: str) -> None:
    """In a call, and in one that continues a cache; each row has other gaps, or none."""
    model, reference = built(subject, scheme), built(subject, scheme)
    model = spreading.spread(model.to(_FIRST))
    for one in (model, reference):
        one.set_attn_implementation("sdpa")
    with torch.device("cpu"):
        ids, mask = tokens(), torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, 5:7] = mask[1, :2] = 0
        for shown in (mask, left_padding(LENGTH, 3), mask[1:].expand(2, -1)):
            wanted, real = reference(input_ids=ids, attention_mask=shown).logits, shown.bool()
            found = model(input_ids=ids.to(_FIRST), attention_mask=shown.to(_FIRST)).logits.cpu()
            assert close(found[real], wanted[real])
        if subject == "llama":
            longer = torch.cat([mask, mask], 1)
            pieces = (LENGTH, 7, 1, 1, 5)
            wanted = decoded(reference, torch.cat([ids, ids], 1), DynamicCache(), pieces, attention_mask=longer)
            both = torch.cat([ids, ids], 1).to(_FIRST)
            found = decoded(model, both, DynamicCache(), pieces, attention_mask=longer.to(_FIRST)).cpu()
            assert close(found[longer.bool()], wanted[longer.bool()])


@pytest.mark.parametrize(
    ("subject", "scheme"),
    [
        *itertools.product(["qwen2_vl_vision"], ["alibi", "rope_nd", "swin", "learned"]),
        *itertools.product(["qwen2_vl"], ["mrope", "t5"]),
        *itertools.product(["llama", "whisper_audio"], ["rope", "cope", "t5"]),
    ],
)
@torch.no_grad()
def test_the_first_layer_may_be_on_another_device_than_the_inputs(subject: str, scheme: str) -> None:
    if spreading.placement != "split":
        pytest.skip("one device")
    model = built(subject, scheme)
    wanted = SUBJECTS[subject].outputs(model, "cpu")
    model.to(_FIRST)
    dispatch_model(model, spreading.device_map(model, "split", half=0), main_device=_FIRST)
    assert close(SUBJECTS[subject].outputs(model, _FIRST), wanted)


@pytest.mark.parametrize("scheme", ["forget_gate", "shaw"])
@torch.no_grad()
def test_parts_of_a_layer_stand_where_the_layer_stands(scheme: str) -> None:
    if spreading.placement != "split":
        pytest.skip("one device")
    for late in (False, True):
        model = built("llama", scheme)
        if late:
            unpatch_model(model)
        model = spreading.spread(model.to(_FIRST))
        if late:
            patch_model(model, SCHEMES[scheme])
        devices = [layer.self_attn.q_proj.weight.device for layer in model.model.layers]
        sites = list(zip(devices, model.position_encoding.stacks["model"].layers, strict=True))
        owned = {str(device): {one.device for part in own.parts for one in part.parameters()} for device, own in sites}
        shared = sites[0][1].parts[0] is sites[1][1].parts[0]
        assert owned == {_FIRST: {torch.device(_FIRST)}, _SECOND: {torch.device(_FIRST if shared else _SECOND)}}


@torch.no_grad()
def test_what_a_spread_model_says_of_itself() -> None:
    for subject in ("llama", "bert", "gpt2", "t5"):
        with torch.device("cpu"):
            model = SUBJECTS[subject].build()
        wanted = native_scheme(model)
        model = spreading.spread(model.to(_FIRST))
        assert native_scheme(model) == wanted
        assert str(inspect_model(model))
        ids = {"input_ids": tokens()} | ({"decoder_input_ids": tokens()} if subject == "t5" else {})
        before = model(**ids).logits
        patch_model(model, wanted)
        assert close(model(**ids).logits, before)
    extended = spreading.spread(built("llama", "rope").to(_FIRST))
    extend_context(extended, length=256)
    assert SUBJECTS["llama"].outputs(extended, _FIRST).isfinite().all()
