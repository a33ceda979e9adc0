"""Properties of every architecture, part and scheme, measured against the stock model.

A check that the stock model fails too says nothing about a scheme, and is marked "stock".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import UnsupportedError, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.anatomy.anatomy import Anatomy
from hf_posenc.patching.anatomy.architectures import architecture_of
from hf_posenc.patching.anatomy.short_runs import all_equal, embedded, run_briefly
from hf_posenc.patching.layouts import Grid

from .calling import Caller
from .findings import (
    CONTENT_BOUND,
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
from .inputs import accepted, running, tensors_of
from .part_schemes import columns_of, is_tower, on_axes, schemes_of
from .population import Pair
from .shuffling import Shuffled
from .tiny import one_layer_models
from .traces import difference, trace_of

HIDDEN = 64
#: Patches of an image, enough that some are away from its edges.
_ENOUGH_TOKENS = 16
#: Schemes that are the same as a native one of their name.
_WITHOUT_OPTIONS = frozenset(("alibi", "learned", "sinusoidal"))
#: Where no scheme acts in attention, and what it reads may depend on the order of tokens.
_SPARSE = Finding("skip", note="sparse attention")

Outputs = tuple[Tensor, list[Tensor]]
#: A way of calling a model.
Way = Callable[[Caller], Tensor]
_WHOLE: Way = methodcaller("outputs")
_LOGITS: Way = methodcaller("logits")
_EAGER: Way = methodcaller("eager")
_ANOTHER_SIZE: Way = methodcaller("of_another_size")


def check_pair(pair: Pair, part: str | None = None) -> list[Record]:
    """Builds the model of a pair and runs every check for every scheme, in every part of a model that has several."""
    caller = Caller(pair)
    if pair.has_vocabulary_head:
        return [Checker(caller).record_of()]
    try:
        parts = Anatomy(caller.model).parts
    except UnsupportedError as error:
        return [Checker(caller).record_of_refusal(error)]
    return [Checker(caller, name, parts).record_of() for name in parts if part in (None, name)]


class Checker:
    """The checks of a model of text, or of one part of another model.

    Args:
        caller: the model and its inputs.
        part: the name of the part; empty for a model of text, which gets more checks.
        parts: the names of all parts.
    """

    def __init__(self, caller: Caller, part: str = "", parts: list[str] | None = None) -> None:
        self.caller, self.part, self.parts = caller, part, parts or []
        self.pair, self.model = caller.pair, caller.model
        self.where: dict[str, Any] = {"part": part} if len(self.parts) > 1 else {}
        self.record = Record(self.pair.name, part=part, columns=columns_of(part or "text", []))
        self.without: Outputs | None = None

    def record_of(self) -> Record:
        """Runs everything."""
        try:
            self.stacks = Anatomy(self.model).stacks([self.part] if self.part else None)
            unpatch_model(self.model)  # A part that is saved with its model is refused here.
        except UnsupportedError as error:
            return self.record_of_refusal(error)
        self.record.columns = columns_of(self.part or "text", self.stacks)
        with torch.no_grad():
            self.stock, self.stock_inside = self._run()
            if self.part and not self.stock_inside:
                self.record.unbuilt = "the inputs of this sweep do not reach this part"
                return self.record
            self._probe_stock()
            axes = self._axes()
            for column, (scheme, options) in schemes_of(self.record.columns).items():
                self.found: dict[str, Finding] = {}
                self.record.findings[column] = self.found
                self._check_scheme(scheme, on_axes(options, axes))
                self.found["undo"] = self._undo()
        return self.record

    def record_of_refusal(self, error: UnsupportedError) -> Record:
        """Checks that every scheme is refused, and that a refusal leaves no trace."""
        self.record.refusal = str(error)
        trace = trace_of(self.model)
        for column, (scheme, options) in schemes_of(self.record.columns).items():
            if scheme == "native":
                continue
            try:
                patch_model(self.model, scheme, **self.where, **options)
            except UnsupportedError:
                changed = difference(trace, trace_of(self.model))
                finding = Finding("fail", note=changed) if changed else Finding("pass")
            else:
                finding = Finding("fail", note="was not refused")
                unpatch_model(self.model)
            self.record.findings[column] = {"refused": finding}
        return self.record

    def _probe_stock(self) -> None:
        """What the stock model can do without a scheme."""
        caller = self.caller
        self.scale = float(self.stock.std()) or 1.0
        self.trace = trace_of(self.model)
        self.is_deterministic = torch.equal(caller.outputs(), self.stock)
        self.eager_holds = bool(getattr(self.model, "_supports_sdpa", False)) and self._holds(_EAGER, self.stock)
        logits = attempt(caller.logits) if self.record.columns == "text" else Finding("skip")
        self.has_logits = not isinstance(logits, Finding)
        self.ways = {} if isinstance(logits, Finding) else dict(self._ways(logits))
        self.one_layer = [] if self.part else one_layer_models(self.pair)
        self.positional = [above(caller.permuted(model)).verdict == "pass" for model in self.one_layer]
        if self.part:
            size = attempt(caller.of_another_size)
            self.at_another_size = None if isinstance(size, Finding) else size
        self.before = self._outputs_of_other_parts()
        on_grid = self.record.columns == "vision" and len(self.parts) == 1
        self.shuffled = Shuffled.of(caller, self.stacks) if on_grid else None

    def _ways(self, logits: Tensor) -> Iterator[tuple[str, tuple[Way, bool]]]:
        """The ways to compute the logits in steps or behind padding, and whether those of the stock model are equal."""
        caller = self.caller
        if self.part or self.pair.kind in ("causal", "seq2seq"):
            ways = [{"masked": mask, "given": given} for mask in (True, False) for given in (False, True)]
            yield "decode", self._way("decoded", [{}] if self.part else ways, logits)
        if not self.part and self.pair.kind in ("causal", "seq2seq"):
            yield "static", self._way("decoded", [way | {"static": True} for way in ways[::2]], logits)
        if self.part and caller.tokens_name != "input_ids":
            return
        takes_ids = "position_ids" in accepted(type(running(self.model)).forward)
        ways = [{"with_ids": True}, {"with_ids": False}] if takes_ids else [{"with_ids": False}]
        holding = [way for way in ways if self._holds(methodcaller("padded", **way), logits)]
        if self.part:
            # Without positions, some models number padding too, as only schemes of absolute positions show.
            yield "left padding", self._way("padded", holding or ways[-1:], logits)
            return
        for way in holding or ways[-1:]:
            name = "left padding with ids" if way["with_ids"] else "left padding"
            yield name, (methodcaller("padded", **way), bool(holding))

    def _way(self, method: str, options: list[dict[str, bool]], expected: Tensor) -> tuple[Way, bool]:
        """The first options with which the stock model computes what is expected; else the first ones."""
        ways = [methodcaller(method, **given) for given in options]
        holding = next((way for way in ways if self._holds(way, expected)), None)
        return holding or ways[0], holding is not None

    def _axes(self) -> int:
        """3 where patches have frames, rows and columns, which a call with a scheme on two axes says."""
        if self.record.columns != "vision":
            return 1

        def placed() -> Tensor:
            patch_model(self.model, "sinusoidal", axes=2, **self.where)
            return self.caller.outputs()

        value = attempt(placed)
        unpatch_model(self.model)
        return 3 if isinstance(value, Finding) and "positions on 3 axes" in value.note else 2

    def _check_scheme(self, scheme: str, options: dict[str, Any]) -> None:
        try:
            if scheme == "native":
                config = native_scheme(self.model, **self.where)
                self.record.native = brief(config)
                patch_model(self.model, config, **self.where)
            else:
                self._patch(self.model, scheme, options)
        except Exception as error:  # As in `attempt`: the row says what went wrong, and other schemes are checked.
            self.found["patch"] = refused_or_failed(error)
            if scheme == "native":
                self.record.native = f"({error})"
            return
        ran = attempt(self._run, refusable=bool(self.part))
        if isinstance(ran, Finding):
            self.found["forward"] = ran
            return
        self.found["forward"] = Finding("pass" if bool(torch.isfinite(ran[0]).all()) else "fail")
        if scheme == "native":
            self.found["stock"] = at_most(self._distance(ran[0], self.stock), NATIVE_BOUND)
            if self.found["stock"].verdict == "fail":
                self.found["stock"] = self._in_float64(_WHOLE, None, NATIVE_BOUND)
            if self.part and self.at_another_size is not None:
                self.found["stock at another size"] = self._same(_ANOTHER_SIZE, self.at_another_size)
        else:
            self._check_effect(scheme, ran)
            for index, model in enumerate(self.one_layer):
                self.found[f"order {index}"] = self._check_order(scheme, options, model, self.positional[index])
            if not self.part and scheme != "none":
                self.found["every layer"] = self._every_layer(scheme, options)
        self._check_consistency(ran[0])

    def _patch(self, model: PreTrainedModel, scheme: str, options: dict[str, Any], **more: Any) -> None:
        patch_model(model, scheme, **self.where, **options, **more)
        stir(model)

    def _run(self) -> Outputs:
        """The outputs of the model, and those of the attention in the part, because the former may show little."""
        attentions = [attention.module for stack in self.stacks for attention in stack.attentions]
        with kept_outputs(attentions if self.part else []) as inside:
            return self.caller.outputs(), inside

    def _change(self, ours: Outputs, theirs: Outputs) -> float:
        """How much a scheme changes, in the outputs or inside."""
        pairs = zip(ours[1], theirs[1], strict=False)
        changes = (float((one - two).abs().max() / two.std()) for one, two in pairs if one.shape == two.shape)
        return max(self._distance(ours[0], theirs[0]), *changes, 0.0)

    def _check_effect(self, scheme: str, ran: Outputs) -> None:
        changed = self._change(ran, (self.stock, self.stock_inside))
        if scheme == "none":
            self.without = ran
            if self.part:
                self._check_one_colour()
            else:
                self.found["content"] = self._depends_on_content()
            without_positions = self.record.native == "none"
            self.found["effect"] = (
                at_most(self._distance(ran[0], self.stock), NATIVE_BOUND) if without_positions else above(changed)
            )
        else:
            same = self.record.native == scheme and scheme in (_WITHOUT_OPTIONS if self.part else ("alibi",))
            self.found["effect"] = Finding("skip", changed, "its own") if same else above(changed)
            if self.without is not None:
                self.found["not none"] = above(self._change(ran, self.without))
        if self.shuffled is not None:
            moved = attempt(self.shuffled.distance)
            if not isinstance(moved, Finding):
                moved = at_most(moved, SAME_BOUND) if scheme == "none" else above(moved)
            self.found["shuffled patches"] = moved

    def _check_order(self, scheme: str, options: dict[str, Any], model: PreTrainedModel, positional: bool) -> Finding:
        """Without positions the order of earlier tokens is invisible in one layer; with any scheme it is not."""
        if scheme == "none" and any(stack.sparse for stack in self.stacks):
            return _SPARSE

        def permuted() -> float:
            self._patch(model, scheme, options)
            return self.caller.permuted(model)

        value = attempt(permuted)
        unpatch_model(model)
        if isinstance(value, Finding):
            return value
        if scheme != "none":
            return above(value)
        kept = architecture_of(self.model).kept
        finding = at_most(value, KEPT_BOUND if kept else SAME_BOUND)
        finding.note = "; ".join(kept) if value > SAME_BOUND else ""
        return finding

    def _every_layer(self, scheme: str, options: dict[str, Any]) -> Finding:
        """The scheme in one layer and nothing elsewhere differs from nothing, for every layer."""
        if scheme == "sinusoidal":
            return Finding("skip", note="acts before the layers")
        if self.without is None:
            return Finding("skip", note="there is nothing to compare with")
        without = self.without[0]

        def effect(layer: int) -> float:
            self._patch(self.model, scheme, options, layers=[layer], elsewhere="none")
            return self._distance(self.caller.outputs(), without)

        layers = sorted({layer for stack in self.stacks for layer in stack.layers()})
        smallest = attempt(lambda: min(effect(layer) for layer in layers))
        self._patch(self.model, scheme, options)
        return smallest if isinstance(smallest, Finding) else above(smallest)

    def _depends_on_content(self) -> Finding:
        """Attention that is uniform adds up the effects of two tokens; real attention does not."""
        if self.stacks[0].attentions[0].sparse:
            return _SPARSE
        tokens = self.caller.inputs["input_ids"][:1, :11]
        ends: list[Tensor] = []
        for first, second in ((9, 19), (9, 59), (109, 19), (109, 59)):
            changed = tokens.clone()
            changed[0, 6], changed[0, 8] = first, second
            inputs = {name: changed if name == "input_ids" else changed.flip(-1) for name in self.caller.inputs}
            with kept_outputs([self.stacks[0].attentions[0].module]) as outputs:
                self.caller.logits(inputs)
            ends.append(_last_token(outputs[0], tokens.shape[1]))
        a, b, c, d = ends
        interaction = float((a - b - c + d).abs().max() / (a - d).abs().max().clamp(min=1e-12))
        return Finding("pass" if interaction > CONTENT_BOUND else "fail", interaction)

    def _check_one_colour(self) -> None:
        """Without positions, some neighbours are equal in an image of one colour, whatever its edges do to others."""
        for stack in self.stacks:
            if not isinstance(stack.layout, Grid):
                continue
            with embedded(stack) as seen:
                try:
                    run_briefly(Anatomy(self.model), [stack], 3, change=all_equal)
                except UnsupportedError:
                    continue
            tokens = seen[0][0] if seen else torch.zeros(0, 1)
            if len(tokens) >= _ENOUGH_TOKENS:
                nearest = (tokens[1:] - tokens[:-1]).abs().amax(-1).min() / tokens.std()
                self.found["one colour"] = at_most(float(nearest), SAME_BOUND)

    def _check_consistency(self, full: Tensor) -> None:
        caller = self.caller
        logits = full if not self.part else attempt(caller.logits) if self.has_logits else None
        if isinstance(logits, Finding):
            self.found["logits"] = logits
        elif logits is not None:
            kept = [reason for reason in architecture_of(self.model).kept if "padding" in reason]
            for name, (compute, stock_holds) in self.ways.items():
                self.found[name] = self._same(compute, logits, stock_holds, _LOGITS)
                if kept and "padding" in name and self.found[name].verdict == "fail":
                    self.found[name] = Finding("stock", self.found[name].value, kept[0])
        else:
            ran = attempt(caller.of_another_size, refusable=True)
            finding = ran if isinstance(ran, Finding) else Finding("pass")
            self.found["another size"] = _unless_stock(finding, self.at_another_size is not None)
        if self.eager_holds:
            self.found["eager"] = self._same(_EAGER, full, whole=_WHOLE)
        if self.record.columns == "text" and self.before:
            after = attempt(self._outputs_of_other_parts)
            self.found["other parts"] = after if isinstance(after, Finding) else _equal(self.before, after)

    def _outputs_of_other_parts(self) -> list[Tensor]:
        """The outputs of the stacks of vision and audio parts."""
        towers = [other for other in self.parts if other != self.part and is_tower(other)]
        found = [attempt(partial(Anatomy(self.model).stacks, [tower])) for tower in towers]
        modules = [stack.module for stacks in found if not isinstance(stacks, Finding) for stack in stacks]
        with kept_outputs(modules) as outputs:
            if modules:
                self.caller.outputs()
        return outputs

    def _undo(self) -> Finding:
        unpatch_model(self.model)
        changed = difference(self.trace, trace_of(self.model))
        if changed:
            return Finding("fail", note=changed)
        same = not self.is_deterministic or torch.equal(self.caller.outputs(), self.stock)
        return Finding("pass") if same else Finding("fail", note="other outputs")

    def _same(self, way: Way, expected: Tensor, stock_holds: bool = True, whole: Way | None = None) -> Finding:
        """Whether a way of calling the model computes what is expected.

        Args:
            whole: what computes `expected`. If it is given, a difference is measured again in float64.
        """
        value = attempt(lambda: self._distance(way(self.caller), expected), refusable=True)
        finding = value if isinstance(value, Finding) else at_most(value, SAME_BOUND)
        if finding.verdict == "fail" and finding.value is not None and stock_holds and whole is not None:
            finding = self._in_float64(way, whole, SAME_BOUND)
        return _unless_stock(finding, stock_holds)

    def _in_float64(self, way: Way, whole: Way | None, bound: float) -> Finding:
        """A difference measured in float64, where rounding does not reach the bound.

        Args:
            whole: the other. `None` calls the stock model in the same way.
        """

        def measured() -> float:
            twin = self.caller.in_float64()
            ours = way(twin)
            if whole is None:
                unpatch_model(twin.model)
            return self._distance(ours, (whole or way)(twin))

        value = attempt(measured)
        return value if isinstance(value, Finding) else at_most(value, bound)

    def _holds(self, way: Way, expected: Tensor) -> bool:
        return self._same(way, expected).verdict == "pass"

    def _distance(self, ours: Tensor, theirs: Tensor) -> float:
        if ours.shape != theirs.shape:
            return float("inf")
        return float((ours - theirs).abs().max()) / self.scale


@contextmanager
def kept_outputs(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """The first tensor that each call of some modules returns."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.extend(one.detach().clone() for one in tensors_of(output)[:1])

    hooks = [module.register_forward_hook(keep) for module in modules]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def stir(model: PreTrainedModel) -> None:
    """Gives every learned part of a scheme values of size 1; projections of hidden states, outputs of that size."""
    torch.manual_seed(3)
    for parameter in model.position_encoding.parameters():
        parameter.data.normal_(0.0, HIDDEN**-0.5 if parameter.shape[-1] == HIDDEN else 1.0)


def brief(config: Any) -> str:
    """The names of the schemes in a config."""
    fields = getattr(config, "layers", None) or getattr(config, "parts", None)
    if fields is not None:
        names = list(dict.fromkeys(brief(one) for one in fields))
        return (" / " if hasattr(config, "layers") else " + ").join(names)
    return str(config.name)


def _unless_stock(finding: Finding, stock_holds: bool) -> Finding:
    if finding.verdict == "fail" and not stock_holds:
        finding.verdict = "stock"
    return finding


def _equal(before: list[Tensor], after: list[Tensor]) -> Finding:
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    return Finding("pass" if same else "fail")


def _last_token(output: Tensor, length: int) -> Tensor:
    """What belongs to the last of `length` tokens, on any time axis; some models add tokens in front."""
    shape = list(output.shape)
    axis = shape.index(length) if length in shape else shape.index(max(shape[1:-1]))
    return output.select(axis, -1).flatten()
