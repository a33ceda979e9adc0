"""Every form in which a bias reaches a kernel, inside models, against the dense bias of eager attention.

Blocks are made so small that each call has several. Losses, and the gradients of all weights, have to agree.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_posenc import BuildContext, ComposedConfig, RopeConfig
from hf_posenc.attention import backends
from hf_posenc.attention.block_attention import AttentionCall
from hf_posenc.attention.forms import FusedForm, RowsForm
from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes import get_scheme
from tests.kits.decoding import left_padding
from tests.matrix.running import gradients, outputs, patched, tokens
from tests.schemes.table import VARIANTS, parts_for
from tests.thinning import mostly_slow

from .block_sizes import set_sizes
from .fused import causal, flash_kernel

LENGTH = 14
RISING = torch.tensor([0, 1, 2, 3, 4, 10, 11, 12, 40, 41, 42, 43, 44, 45])
RESTARTING = torch.cat((torch.arange(8), torch.arange(LENGTH - 8)))

#: Variants with a bias. Those of a family that is wide, and some that are put together here.
BIASED = {label: config for _, config, label in VARIANTS if parts_for(config).logit_bias is not None}
BIASED |= {
    "learned alibi": get_scheme("alibi")(learnable=True),  # type: ignore[call-arg]
    "alibi over a scale": ComposedConfig((get_scheme("alibi")(), get_scheme("ssmax")())),
    "forget_gate over rope": ComposedConfig((get_scheme("forget_gate")(), RopeConfig())),
    "forget_gate and t5": ComposedConfig((get_scheme("forget_gate")(), get_scheme("t5")())),
    "forget_gate and alibi": ComposedConfig((get_scheme("forget_gate")(), get_scheme("alibi")())),
    "forget_gate and cope": ComposedConfig((get_scheme("forget_gate")(), get_scheme("cope")())),
    "alibi over a shift": get_scheme("position_shift")(inner="alibi", offset=3),  # type: ignore[call-arg]
}


def _takes(label: str, *, causal: bool) -> bool:
    """Whether a tiny model of this direction takes a variant. Its parts are built alone: models would take seconds."""
    try:
        BIASED[label].build(BuildContext(32, 4, 8, causal=causal, max_positions=64, num_key_value_heads=2))
    except (UnsupportedError, ValueError):
        return False
    return True


IN_DECODERS = [label for label in BIASED if _takes(label, causal=True)]
IN_ENCODERS = [label for label in BIASED if _takes(label, causal=False)]
#: BART has an encoder and a decoder.
IN_BOTH = [label for label in IN_ENCODERS if label in IN_DECODERS]


def in_turn(name: str, cases: dict[str, list[str]]) -> Any:
    """All pairs of a label and a case that takes it; by default one for each label, and they go round."""
    pairs, chosen = [(label, case) for case, labels in cases.items() for label in labels], set()
    for index, label in enumerate(dict(pairs)):
        taking = [case for case, labels in cases.items() if label in labels]
        chosen.add((label, taking[index % len(taking)]))
    return pytest.mark.parametrize(("label", name), mostly_slow(pairs, chosen.__contains__))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats short inputs like long ones, because a matrix would replace the kernels for so few pairs."""
    blocks = {"distance_rows": 5, "backward_rows": 4, "bias_numbers": 2 * 4 * 3 * LENGTH}
    set_sizes(monkeypatch, short_pairs=0, shared_numbers=0, **blocks)


def inputs(kind: str) -> dict[str, Tensor]:
    if kind == "padding":
        return {"attention_mask": left_padding(LENGTH, 5)}
    return {"position_ids": RESTARTING.expand(2, -1)} if kind == "packing" else {}


def loss_and_gradients(model: Any, backend: str, kind: str = "plain") -> dict[str, Tensor]:
    model.set_attn_implementation(backend)
    given = inputs(kind)
    found = outputs(model, tokens(length=LENGTH), **given).float()
    real = given.get("attention_mask", torch.ones(2, LENGTH)).unsqueeze(-1)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    found = found * real
    of_weights = gradients(model, (found * weights).sum() / found.detach().abs().max())
    return {name: one.float() for name, one in of_weights.items()} | {"outputs": found.detach()}


def compare(architecture: str, label: str, kind: str) -> None:
    model = patched(architecture, BIASED[label])
    found, wanted = (loss_and_gradients(model, backend, kind) for backend in ("sdpa", "eager"))
    assert found.keys() == wanted.keys()
    assert any("position_encoding" in name for name in found) == any(
        True for part in parts_for(BIASED[label]) for _ in part.parameters()
    )
    # Some gradients are zero but for rounding: softmax does not see the bias of a key.
    least = 1e-2 * max(float(one.norm()) for name, one in wanted.items() if name != "outputs")
    for name, one in found.items():
        # Two tiny layers in float32 differ by the order of some hundred additions.
        assert float((one - wanted[name]).norm()) <= 2e-4 * max(float(wanted[name].norm()), least), name


def test_every_variant_has_a_place() -> None:
    assert set(IN_DECODERS) | set(IN_ENCODERS) == set(BIASED)
    assert len(IN_DECODERS) > 20
    assert len(IN_ENCODERS) > 20


@in_turn("kind", dict.fromkeys(("plain", "padding", "packing"), IN_DECODERS))
def test_in_a_decoder(label: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if label == "kerple-3":
        # Numbers below their minimum drop gradients that lead further out, block by block where positions have gaps,
        # and what is dropped does not add up: compared in one block.
        set_sizes(monkeypatch, bias_numbers=2**22, backward_rows=LENGTH)
    if kind == "packing" and any(part.length_dependent for part in parts_for(BIASED[label])):
        with pytest.raises(UnsupportedError, match="packed"):
            compare("llama_gqa", label, kind)
    else:
        compare("llama_gqa", label, kind)


@pytest.mark.parametrize("label", ["alibi-0", "t5-0", "kerple-0", "shaw-0", "forget_gate-0", "cope-0"])
def test_under_a_sliding_window(label: str) -> None:
    compare("mistral_sliding", label, "plain")
    compare("mistral_sliding", label, "padding")


@in_turn("case", {"bert plain": IN_ENCODERS, "bert padding": IN_ENCODERS, "bart padding": IN_BOTH})
def test_in_an_encoder(label: str, case: str) -> None:
    architecture, kind = case.split()
    compare(architecture, label, kind)


@pytest.mark.parametrize("label", ["alibi-0", "t5-0", "shaw-0", "forget_gate-0"])
def test_in_bfloat16(label: str) -> None:
    """About as near to float32 as eager attention in bfloat16 is, whose rounding errors are other ones."""
    model = patched("llama_gqa", BIASED[label])
    exact = loss_and_gradients(model, "eager")
    found, eager = (loss_and_gradients(model.to(torch.bfloat16), backend) for backend in ("sdpa", "eager"))

    def error(given: dict[str, Tensor]) -> float:
        return max(float((given[name] - one).norm() / one.norm()) for name, one in exact.items())

    assert error(found) <= 1.5 * error(eager)
    assert error(found) <= 0.3


@pytest.mark.parametrize(
    ("label", "form"),
    [
        ("t5-0", FusedForm),
        ("forget_gate-0", FusedForm),
        ("forget_gate and alibi", FusedForm),
        ("forget_gate and t5", FusedForm),
        ("alibi over a shift", FusedForm),
        ("cope-0", RowsForm),
        ("alibi over a scale", RowsForm),
    ],
)
def test_no_bias_of_all_pairs_exists(label: str, form: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the forward pass nor in the backward pass."""
    rows: list[int] = []
    own = form.rows  # type: ignore[attr-defined]

    def watched(self: Any, start: int = 0, stop: int = LENGTH, key_count: int | None = None) -> Tensor:
        rows.append(stop - start)
        return own(self, start, stop, key_count)

    monkeypatch.setattr(form, "rows", watched)
    found = loss_and_gradients(patched("llama_gqa", BIASED[label]), "sdpa")
    assert found["outputs"].isfinite().all()
    assert max(rows, default=0) <= LENGTH // 2
    assert bool(rows) == (form is RowsForm)


@pytest.mark.parametrize("label", ["t5-0", "forget_gate-0", "shaw-0"])
def test_dropout_is_drawn_again_alike_in_the_backward_pass(label: str) -> None:
    """The directional derivative with a fixed seed is that of the gradient: 3e-2 of finite differences in float32."""
    model = patched("llama_gqa", BIASED[label], attn_implementation="sdpa", attention_dropout=0.4).train()
    weights = torch.randn(2, LENGTH, 96, generator=torch.Generator().manual_seed(5))

    def loss(seed: int = 11) -> Tensor:
        torch.manual_seed(seed)
        return (model(tokens(length=LENGTH)).logits * weights).mean()

    with torch.no_grad():
        assert abs(float(loss(11) - loss(12))) > 1e-4 * abs(float(loss(11)))
    loss().backward()
    parameter = next(p for p in model.position_encoding.parameters())
    assert parameter.grad is not None
    direction = parameter.grad / parameter.grad.norm()
    step = 1e-2
    with torch.no_grad():
        parameter += step * direction
        above = loss()
        parameter -= 2 * step * direction
        below = loss()
    derivative = float((above - below) / (2 * step))
    assert derivative == pytest.approx(float(parameter.grad.norm()), rel=3e-2)


def with_flash(label: str) -> Any:
    from transformers import AttentionInterface

    AttentionInterface.register("flash_kernel_for_tests", flash_kernel(causal))
    model = patched("llama_gqa", BIASED[label], attn_implementation="sdpa")
    model.config._attn_implementation = "flash_kernel_for_tests"
    return model


@pytest.mark.parametrize(
    ("label", "positions", "in_order"),
    [
        ("alibi-0", None, True),
        ("forget_gate-0", None, True),
        ("alibi-0", RISING, True),
        ("alibi-0", RESTARTING, False),
        ("alibi-0", RISING.flip(0), False),
    ],
)
@torch.no_grad()
def test_a_flash_kernel_gets_a_separable_bias_in_its_heads_where_positions_rise(
    label: str, positions: Tensor | None, in_order: bool
) -> None:
    """A number per key is a distance where no key in front of a query has a later position."""
    given = {} if positions is None else {"position_ids": positions.expand(2, -1), "use_cache": True}
    if in_order:
        plain = patched("llama_gqa", BIASED[label], attn_implementation="sdpa")
        found, wanted = (model(tokens(length=LENGTH), **given).logits for model in (with_flash(label), plain))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        return
    with pytest.raises(UnsupportedError, match="set_attn_implementation"):
        with_flash(label)(tokens(length=LENGTH), **given)


@torch.no_grad()
def test_a_flash_kernel_that_separates_documents_gets_packed_ones() -> None:
    """In one row, whose documents begin at position 0."""
    from transformers import AttentionInterface

    document = (RESTARTING == 0).cumsum(0)

    def same_document(queries: int, keys: int, mask: Any) -> Tensor:
        of_keys = document[:keys]  # A new function is first tried on fewer.
        return (of_keys == of_keys[:, None]).tril()

    ids, model = tokens(1, LENGTH), with_flash("alibi-0")
    AttentionInterface.register("flash_kernel_for_tests", flash_kernel(same_document))
    found = model(ids, position_ids=RESTARTING[None], use_cache=False).logits
    plain = patched("llama_gqa", BIASED["alibi-0"], attn_implementation="sdpa")
    alone = [plain(part, use_cache=False).logits for part in ids.split([8, LENGTH - 8], dim=1)]
    torch.testing.assert_close(found, torch.cat(alone, dim=1), atol=1e-4, rtol=1e-4)


def test_a_flash_kernel_trains_around_a_fixed_bias_only() -> None:
    with_flash("alibi-0")(tokens(length=LENGTH)).logits.sum().backward()
    for label in ("forget_gate-0", "learned alibi", "t5-0"):
        with pytest.raises(UnsupportedError, match="set_attn_implementation"):
            with_flash(label)(tokens(length=LENGTH))


def test_a_flash_kernel_with_a_soft_cap_is_refused() -> None:
    form = FusedForm(torch.zeros(4, 5), 3, 3, torch.ones(4))
    heads = torch.zeros(1, 4, 3, 8)
    call = AttentionCall("flash_attention_2", flash_kernel(causal), None, (), {"softcap": 30.0})
    attend = backends.attention_with(call, form, nn.Module(), heads, heads)
    with pytest.raises(UnsupportedError, match="caps its logits"):
        attend(nn.Module(), heads, heads, heads)


def test_the_gradient_of_a_mask_that_is_learned() -> None:
    found = []
    for backend in ("sdpa", "eager"):
        model = patched("llama_gqa", BIASED["t5-0"], attn_implementation=backend)
        mask = torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1).requires_grad_()
        model(tokens(length=LENGTH), attention_mask=mask).logits.square().mean().backward()
        assert mask.grad is not None
        found.append(mask.grad)
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("scheme", ["t5", "kerple", "pope"])
def test_transforms_of_torch_func(scheme: str) -> None:
    """They see through plain operations only. Gradients are those of the inputs and of the scheme."""
    model, ids = patched("llama_gqa", scheme, attn_implementation="sdpa"), tokens(2, LENGTH)
    embedded = model.get_input_embeddings()(ids).detach()
    parameters = {name: one.detach() for name, one in model.named_parameters() if "position_encoding" in name}

    def outputs_of(row: Tensor, own: dict[str, Tensor] = parameters) -> Tensor:
        given = {"inputs_embeds": row.unsqueeze(0), "use_cache": False}
        return torch.func.functional_call(model, own, (), given).logits[0]

    torch.testing.assert_close(torch.func.vmap(outputs_of)(embedded), model(ids).logits, atol=1e-5, rtol=1e-4)
    row = embedded[0].clone().requires_grad_()
    found = torch.func.grad(lambda *given: outputs_of(*given).square().mean(), argnums=(0, 1))(embedded[0], parameters)
    model(inputs_embeds=row.unsqueeze(0), use_cache=False).logits.square().mean().backward()
    wanted = row.grad, {name: model.get_parameter(name).grad for name in parameters}
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-3)


def test_a_function_of_somebody_else_gets_the_matrix() -> None:
    """A function that a user registers under "sdpa" is called, with the bias as transformers passes it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: list[torch.Size] = []

    def own(*args: Any, position_bias: Tensor | None = None, **kwargs: Any) -> Any:
        seen.extend([] if position_bias is None else [position_bias.shape])  # A new function is first tried without.
        return sdpa_attention_forward(*args, position_bias=position_bias, **kwargs)

    model = patched("llama_gqa", BIASED["t5-0"], attn_implementation="sdpa")
    wanted = model(tokens(length=LENGTH)).logits
    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        found = model(tokens(length=LENGTH)).logits
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert seen == [torch.Size((1, 4, LENGTH, LENGTH))] * 2
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_matrix_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "DENSE_LIMIT", 4 * 2 * 4 * LENGTH * LENGTH - 1)
    model = patched("llama_gqa", BIASED["cope-0"], attn_implementation="flex_attention")
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"matrix of 14 x 14.*DENSE_LIMIT"):
        model(tokens(length=LENGTH))
