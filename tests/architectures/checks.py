"""What has to hold for every architecture and scheme, measured against the stock model.

A check that the stock model fails as well says nothing about a scheme and is marked so ("stock").
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc import UnsupportedError, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.anatomy.anatomy import find_stacks
from hf_posenc.patching.anatomy.architectures import architecture_of

from .calling import Caller
from .findings import (
    CONTENT_BOUND,
    EFFECT_BOUND,
    KEPT_BOUND,
    NATIVE_BOUND,
    SAME_BOUND,
    Finding,
    Record,
    above,
    at_most,
    attempt,
    refused_or_failed,
)
from .population import Pair
from .tiny import WITHOUT_POSITIONS, one_layer_models
from .traces import difference, trace_of

HIDDEN = 64
SCHEMES = ("native", "none", "alibi", "t5", "rope", "sinusoidal", "forget_gate", "shaw", "pope")
#: Small enough for the tiny models, other than what any of them has natively, and gates that do not close at once.
OPTIONS: dict[str, dict[str, Any]] = {
    "rope": {"theta": 100.0},
    "shaw": {"max_distance": 4},
    "forget_gate": {"initial_bias": 2.0},
}


def check_pair(pair: Pair, schemes: tuple[str, ...] = SCHEMES) -> Record:
    """Builds the model of a pair and runs every check for every scheme."""
    return Checker(pair).record_of(schemes)


class Checker(Caller):
    """The checks of one pair.

    Args:
        pair: the architecture and its head.
    """

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.record = Record(pair.name)

    def record_of(self, schemes: tuple[str, ...]) -> Record:
        """Runs everything."""
        try:
            find_stacks(self.model)
        except UnsupportedError as error:
            self._check_refusal(error, schemes)
            return self.record
        with torch.no_grad():
            self.stock = self._run(self.tokens)
            self.scale = float(self.stock.std())
            self._probe_stock()
            self.trace = trace_of(self.model)
            self.without: Tensor | None = None
            for scheme in ("none", *(name for name in schemes if name != "none")):
                found: dict[str, Finding] = {}
                self.record.findings[scheme] = found
                self._check_scheme(scheme, found)
        return self.record

    def _check_refusal(self, error: UnsupportedError, schemes: tuple[str, ...]) -> None:
        """Every scheme is refused, and the refusal leaves no trace."""
        self.record.refusal = str(error)
        trace = trace_of(self.model)
        for scheme in schemes:
            try:
                patch_model(self.model, "rope" if scheme == "native" else scheme)
            except UnsupportedError:
                changed = difference(trace, trace_of(self.model))
                finding = Finding("fail", note=changed) if changed else Finding("pass")
            else:
                finding = Finding("fail", note="was not refused")
            self.record.findings[scheme] = {"refused": finding}

    def _probe_stock(self) -> None:
        """What the stock model can do by itself, and in which way of calling it."""
        full = self.stock
        modes = [(mask, given) for mask in (True, False) for given in (False, True)]
        self.decode_mode = next((mode for mode in modes if self._holds(partial(self._decode, *mode), full)), None)
        self.static_mode = next(
            (mask for mask in (True, False) if self._holds(partial(self._decode, mask, static=True), full)),
            None,
        )
        self.padding_modes = [mode for mode in (True, False) if self._padding_holds(mode)]
        self.switches = bool(getattr(self.model, "_supports_sdpa", False)) and self._holds(self._eager, full)
        self.attention_path = _first_attention(self.model)
        self.own = _own_scheme(self.model)
        self.one_layer = one_layer_models(self.pair)
        self.positional = [self._permuted(model) > EFFECT_BOUND for model in self.one_layer]

    def _check_scheme(self, scheme: str, found: dict[str, Finding]) -> None:
        try:
            config: Any = native_scheme(self.model) if scheme == "native" else scheme
            if scheme == "native":
                self.record.native = brief(config)
                patch_model(self.model, config)
            else:
                self._patch(self.model, scheme, config)
        except Exception as error:  # As in `attempt`: the row says what went wrong, and the other schemes go on.
            found["patch"] = refused_or_failed(error)
            if scheme == "native":
                self.record.native = f"({error})"
            found["undo"] = self._undo()
            return
        full = self._measured(found, "forward", lambda: self._run(self.tokens))
        if full is not None:
            self._check_effect(scheme, config, full, found)
            self._check_consistency(full, found)
        found["undo"] = self._undo()

    def _check_effect(self, scheme: str, config: Any, full: Tensor, found: dict[str, Finding]) -> None:
        changed = self._distance(full, self.stock)
        if scheme == "native":
            found["stock"] = at_most(changed, NATIVE_BOUND)
            return
        if scheme == "none":
            self.without = full
            if self.pair.model_type in WITHOUT_POSITIONS:
                found["effect"] = at_most(changed, 0.0)
            else:
                found["effect"] = above(changed)
            found["content"] = self._depends_on_content()
        else:
            found["effect"] = Finding("skip", changed, "its own") if self.own == scheme == "alibi" else above(changed)
            if self.without is not None:
                found["not none"] = above(self._distance(full, self.without))
                found["every layer"] = self._every_layer(scheme, config)
        for index, model in enumerate(self.one_layer):
            found[f"order {index}"] = self._check_order(scheme, config, model, self.positional[index])

    def _check_order(self, scheme: str, config: Any, model: PreTrainedModel, positional: bool) -> Finding:
        """Without positions the order of earlier tokens is invisible in one layer; with any scheme it is not."""

        def permuted() -> float:
            self._patch(model, scheme, config)
            return self._permuted(model)

        value = attempt(permuted)
        unpatch_model(model)
        if isinstance(value, Finding):
            return value
        if scheme == "none":
            kept = architecture_of(self.model.config).kept
            finding = at_most(value, KEPT_BOUND if kept else SAME_BOUND)
            finding.note = "; ".join(kept) if value > SAME_BOUND else ""
            return finding
        return above(value)

    def _check_consistency(self, full: Tensor, found: dict[str, Finding]) -> None:
        if self.pair.kind in ("causal", "seq2seq"):
            mode, static_mode = self.decode_mode or (True, False), bool(self.static_mode)
            found["decode"] = self._same(lambda: self._decode(*mode), full, self.decode_mode is not None)
            found["static"] = self._same(
                lambda: self._decode(static_mode, static=True), full, self.static_mode is not None
            )
        for with_ids in self.padding_modes or [False]:
            name = "left padding" + (" with ids" if with_ids else "")
            found[name] = self._same(partial(self._padded, with_ids), self._alone(), bool(self.padding_modes))
            kept = [reason for reason in architecture_of(self.model.config).kept if "padding" in reason]
            if kept and found[name].verdict == "fail":
                found[name] = Finding("stock", found[name].value, kept[0])
        if self.switches:
            found["eager"] = self._same(self._eager, full, True)

    def _same(self, compute: Callable[[], Tensor], expected: Tensor, stock_holds: bool) -> Finding:
        value = attempt(lambda: self._distance(compute(), expected), refusable=True)
        finding = value if isinstance(value, Finding) else at_most(value, SAME_BOUND)
        if finding.verdict == "fail" and not stock_holds:
            finding.verdict = "stock"
        return finding

    def _measured(self, found: dict[str, Finding], name: str, compute: Callable[[], Tensor]) -> Tensor | None:
        output = attempt(compute)
        if isinstance(output, Finding):
            found[name] = output
            return None
        found[name] = Finding("pass" if bool(torch.isfinite(output).all()) else "fail")
        return output

    def _undo(self) -> Finding:
        unpatch_model(self.model)
        changed = difference(self.trace, trace_of(self.model))
        if changed:
            return Finding("fail", note=changed)
        return (
            Finding("pass") if torch.equal(self._run(self.tokens), self.stock) else Finding("fail", note="other logits")
        )

    def _patch(self, model: PreTrainedModel, scheme: str, config: Any) -> None:
        patch_model(model, config, **OPTIONS.get(scheme, {}))
        stir(model)

    def _every_layer(self, scheme: str, config: Any) -> Finding:
        """The scheme in one layer and nothing elsewhere differs from nothing, for every layer."""
        if scheme == "sinusoidal":
            return Finding("skip", note="acts before the layers")
        layers = sorted({layer for stack in find_stacks(self.model) for layer in stack.layers()})

        def effect(layer: int) -> float:
            patch_model(self.model, config, layers=[layer], elsewhere="none", **OPTIONS.get(scheme, {}))
            stir(self.model)
            return self._distance(self._run(self.tokens), self.without)

        smallest = attempt(lambda: min(effect(layer) for layer in layers))
        self._patch(self.model, scheme, config)
        return smallest if isinstance(smallest, Finding) else above(smallest)

    def _depends_on_content(self) -> Finding:
        """Attention that is uniform adds up the effects of two tokens; real attention does not."""
        outputs: list[Tensor] = []
        ends: list[Tensor] = []
        tokens = self.tokens[:1, :11]
        module = self.model.get_submodule(self.attention_path)

        def keep(module: Any, args: Any, output: Any) -> None:
            outputs.append(_first_tensor(output))

        hook = module.register_forward_hook(keep)
        try:
            for first, second in ((9, 19), (9, 59), (109, 19), (109, 59)):
                changed = tokens.clone()
                changed[0, 6], changed[0, 8] = first, second
                outputs.clear()
                self._run(changed)
                ends.append(_last_token(outputs[0], tokens.shape[1]))
        finally:
            hook.remove()
        a, b, c, d = ends
        interaction = (a - b - c + d).abs().max() / (a - d).abs().max().clamp(min=1e-12)
        value = float(interaction)
        return Finding("pass" if value > CONTENT_BOUND else "fail", value)

    def _distance(self, ours: Tensor, theirs: Tensor | None) -> float:
        assert theirs is not None
        return float((ours - theirs).abs().max()) / self.scale

    def _holds(self, compute: Callable[[], Tensor], expected: Tensor) -> bool:
        value = attempt(lambda: self._distance(compute(), expected))
        return not isinstance(value, Finding) and value <= SAME_BOUND

    def _padding_holds(self, with_ids: bool) -> bool:
        if with_ids and "position_ids" not in inspect.signature(type(self.model).forward).parameters:
            return False
        return self._holds(lambda: self._padded(with_ids), self._alone())


def stir(model: PreTrainedModel) -> None:
    """Gives every learned part of a scheme values of size 1; projections of hidden states, outputs of that size."""
    encoding = model.position_encoding
    torch.manual_seed(3)
    for parameter in encoding.parameters():
        parameter.data.normal_(0.0, HIDDEN**-0.5 if parameter.shape[-1] == HIDDEN else 1.0)


def _first_tensor(output: Any) -> Tensor:
    """The attention output among whatever a module returns."""
    while not isinstance(output, Tensor):
        values = list(output.values()) if isinstance(output, dict) else list(output)
        output = values[0]
    return output


def _last_token(output: Tensor, length: int) -> Tensor:
    """What belongs to the last of `length` tokens, whichever axis is time; some models add tokens in front."""
    shape = list(output.shape)
    axis = shape.index(length) if length in shape else shape.index(max(shape[1:-1]))
    return output.select(axis, -1).flatten()


def brief(config: Any) -> str:
    """The names of the schemes in a config."""
    fields = getattr(config, "layers", None) or getattr(config, "parts", None)
    if fields is not None:
        names = list(dict.fromkeys(brief(one) for one in fields))
        return (" / " if hasattr(config, "layers") else " + ").join(names)
    return str(config.name)


def _own_scheme(model: PreTrainedModel) -> str:
    try:
        return str(native_scheme(model).name)
    except UnsupportedError:
        return ""


def _first_attention(model: PreTrainedModel) -> str:
    stack = find_stacks(model)[0]
    return ".".join(part for part in (stack.path, stack.attentions[0].path) if part)
