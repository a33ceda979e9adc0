"""What has to hold for every part of a model that reads more than text, and for every scheme in that part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc import UnsupportedError, native_scheme, patch_model, unpatch_model
from hf_posenc.patching.anatomy.anatomy import Anatomy, find_stacks, model_parts
from hf_posenc.patching.anatomy.short_runs import embedded, run_briefly
from hf_posenc.patching.layouts import Grid

from .checks import brief, stir
from .findings import NATIVE_BOUND, SAME_BOUND, Finding, Record, above, at_most, attempt, refused_or_failed
from .inputs import accepted, tensors_of
from .part_calling import PartCaller
from .part_schemes import columns_of, is_tower, on_axes, schemes_of
from .population import Pair
from .shuffling import Shuffled
from .traces import difference, trace_of

#: Patches of an image, so many that some are away from its edges.
_ENOUGH_TOKENS = 16
#: Schemes that are the same as a native one of their name.
_WITHOUT_OPTIONS = frozenset(("alibi", "learned", "sinusoidal"))


def check_parts(pair: Pair, part: str | None = None) -> list[Record]:
    """Builds the model of a pair and runs every check for every part of it.

    Args:
        pair: the architecture.
        part: only this part.
    """
    caller = PartCaller(pair)
    try:
        parts = model_parts(caller.model)
    except UnsupportedError as error:
        return [Record(pair.name, refusal=str(error))]
    return [PartChecker(caller, name, parts).record_of() for name in parts if part in (None, name)]


class PartChecker:
    """The checks of one part.

    Args:
        caller: the model and its inputs.
        part: the name of the part.
        parts: the names of all parts.
    """

    def __init__(self, caller: PartCaller, part: str, parts: list[str]) -> None:
        self.caller, self.part, self.parts = caller, part, parts
        self.model = caller.model
        self.where: dict[str, Any] = {"part": part} if len(parts) > 1 else {}
        self.record = Record(caller.pair.name, part=part, columns=columns_of(part, []))

    def record_of(self) -> Record:
        """Runs everything."""
        try:
            self.stacks = find_stacks(self.model, [self.part])
            unpatch_model(self.model)  # A part of a model that is saved with it is refused here already.
        except UnsupportedError as error:
            self._check_refusal(error)
            return self.record
        self.record.columns = columns_of(self.part, self.stacks)
        with torch.no_grad():
            if not self._is_reached():
                self.record.unbuilt = "the inputs of this sweep do not reach this part"
                return self.record
            self._probe_stock()
            axes = self._axes()
            for column, (scheme, options) in schemes_of(self.record.columns).items():
                found: dict[str, Finding] = {}
                self.record.findings[column] = found
                self._check_scheme(scheme, on_axes(options, axes), found)
        return self.record

    def _is_reached(self) -> bool:
        """Whether a call runs the attention of this part."""
        ran: list[Tensor] = []
        modules = [attention.module for stack in self.stacks for attention in stack.attentions]
        hooks = [module.register_forward_hook(_keep(ran)) for module in modules]
        try:
            self.caller.outputs()
        finally:
            for hook in hooks:
                hook.remove()
        return bool(ran)

    def _check_refusal(self, error: UnsupportedError) -> None:
        """Every scheme is refused, and the refusal leaves no trace."""
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

    def _probe_stock(self) -> None:
        """What the stock model can do by itself."""
        caller = self.caller
        self.stock, self.stock_inside = self._run()
        self.scale = float(self.stock.std()) or 1.0
        self.trace = trace_of(self.model)
        self.without: tuple[Tensor, list[Tensor]] | None = None
        self.is_deterministic = torch.equal(caller.outputs(), self.stock)
        self.eager_holds = bool(getattr(self.model, "_supports_sdpa", False)) and self._holds(caller.eager, self.stock)
        size = attempt(caller.of_another_size)
        self.resizes = not isinstance(size, Finding)
        self.at_another_size = None if isinstance(size, Finding) else size
        self.before = self._outputs_of_other_parts()
        self.shuffled = (
            Shuffled.of(caller, self.stacks) if self.record.columns == "vision" and len(self.parts) == 1 else None
        )
        self.has_logits = False
        self.decodes = self.pads = False
        if self.record.columns == "text":
            logits = attempt(lambda: caller.logits(caller.inputs))
            if not isinstance(logits, Finding):
                self.decodes = self._holds(caller.decoded, logits)
                # Without positions, some models number padding too, as only schemes of absolute positions show.
                caller.passes_positions = "position_ids" in accepted(type(self.model).forward) and (
                    "attention_mask" in caller.inputs
                )
                self.pads = caller.tokens_name == "input_ids" and self._holds(caller.padded, logits)
                if caller.passes_positions and not self.pads:
                    caller.passes_positions = False
                    self.pads = self._holds(caller.padded, logits)
                self.has_logits = True

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

    def _check_scheme(self, scheme: str, options: dict[str, Any], found: dict[str, Finding]) -> None:
        try:
            config: Any = native_scheme(self.model, **self.where) if scheme == "native" else scheme
            if scheme == "native":
                self.record.native = brief(config)
            patch_model(self.model, config, **self.where, **options)
            stir_scheme = scheme != "native"
            if stir_scheme:
                stir(self.model)
        except Exception as error:  # As in `attempt`: the row says what went wrong, and the other schemes go on.
            found["patch"] = refused_or_failed(error)
            if scheme == "native":
                self.record.native = f"({error})"
            found["undo"] = self._undo()
            return
        ran = attempt(self._run, refusable=True)
        if isinstance(ran, Finding):
            found["forward"] = ran
        else:
            full, inside = ran
            found["forward"] = Finding("pass" if bool(torch.isfinite(full).all()) else "fail")
            self._check_effect(scheme, full, inside, found)
            self._check_consistency(full, found)
        found["undo"] = self._undo()

    def _run(self) -> tuple[Tensor, list[Tensor]]:
        """The outputs of the model, and those of the attention in the part, of which the former may show little."""
        inside: list[Tensor] = []
        modules = [attention.module for stack in self.stacks for attention in stack.attentions]
        hooks = [module.register_forward_hook(_keep(inside)) for module in modules]
        try:
            return self.caller.outputs(), inside
        finally:
            for hook in hooks:
                hook.remove()

    def _change(self, full: Tensor, inside: list[Tensor], other: Tensor, other_inside: list[Tensor]) -> float:
        """How much a scheme changes, in the outputs or inside."""
        pairs = zip(inside, other_inside, strict=False)
        changes = (float((one - two).abs().max() / two.std()) for one, two in pairs if one.shape == two.shape)
        return max(self._distance(full, other), *changes, 0.0)

    def _check_effect(self, scheme: str, full: Tensor, inside: list[Tensor], found: dict[str, Finding]) -> None:
        if scheme == "native":
            found["stock"] = at_most(self._distance(full, self.stock), NATIVE_BOUND)
            if self.at_another_size is not None:
                found["stock at another size"] = self._as_stock_at_another_size(self.at_another_size)
            return
        natively_without = self.record.native == "none"
        changed = self._change(full, inside, self.stock, self.stock_inside)
        if scheme == "none":
            self.without = full, inside
            self._check_one_colour(found)
            found["effect"] = (
                at_most(self._distance(full, self.stock), NATIVE_BOUND) if natively_without else above(changed)
            )
        else:
            own = self.record.native == scheme and scheme in _WITHOUT_OPTIONS
            found["effect"] = Finding("skip", changed, "its own") if own else above(changed)
            if self.without is not None:
                found["not none"] = above(self._change(full, inside, *self.without))
        if self.shuffled is not None:
            moved = attempt(self.shuffled.distance)
            if isinstance(moved, Finding):
                found["shuffled patches"] = moved
            else:
                found["shuffled patches"] = at_most(moved, SAME_BOUND) if scheme == "none" else above(moved)

    def _check_one_colour(self, found: dict[str, Finding]) -> None:
        """Without positions, some neighbours are equal in an image of one colour, whatever its edges do to others."""
        for stack in self.stacks:
            if not isinstance(stack.layout, Grid):
                continue
            with embedded(stack) as seen:
                try:
                    run_briefly(Anatomy(self.model), [stack], 3, constant=True)
                except UnsupportedError:
                    continue
            tokens = seen[0][0] if seen else torch.zeros(0, 1)
            if len(tokens) >= _ENOUGH_TOKENS:
                nearest = (tokens[1:] - tokens[:-1]).abs().amax(-1).min() / tokens.std()
                found["one colour"] = at_most(float(nearest), SAME_BOUND)

    def _check_consistency(self, full: Tensor, found: dict[str, Finding]) -> None:
        caller = self.caller
        logits = attempt(lambda: caller.logits(caller.inputs)) if self.has_logits else None
        if isinstance(logits, Finding):
            found["logits"] = logits
        elif logits is not None:
            found["decode"] = self._same(caller.decoded, logits, self.decodes)
            if caller.tokens_name == "input_ids":
                found["left padding"] = self._same(caller.padded, logits, self.pads)
        else:
            found["another size"] = self._runs(caller.of_another_size, self.resizes)
        if self.eager_holds:
            found["eager"] = self._same(caller.eager, full, True)
        if self.record.columns == "text" and self.before:
            after = attempt(self._outputs_of_other_parts)
            found["other parts"] = after if isinstance(after, Finding) else _equal(self.before, after)

    def _outputs_of_other_parts(self) -> list[Tensor]:
        """What the stacks of vision and audio parts compute."""
        outputs: list[Tensor] = []
        hooks = []
        for other in self.parts:
            stacks = attempt(partial(find_stacks, self.model, [other]))
            if other == self.part or isinstance(stacks, Finding) or not is_tower(other):
                continue
            for stack in stacks:
                hooks.append(stack.module.register_forward_hook(_keep(outputs)))
        try:
            if hooks:
                self.caller.outputs()
        finally:
            for hook in hooks:
                hook.remove()
        return outputs

    def _undo(self) -> Finding:
        unpatch_model(self.model)
        changed = difference(self.trace, trace_of(self.model))
        if changed:
            return Finding("fail", note=changed)
        same = not self.is_deterministic or torch.equal(self.caller.outputs(), self.stock)
        return Finding("pass") if same else Finding("fail", note="other outputs")

    def _same(self, compute: Callable[[], Tensor], expected: Tensor, stock_holds: bool) -> Finding:
        value = attempt(lambda: self._distance(compute(), expected), refusable=True)
        finding = value if isinstance(value, Finding) else at_most(value, SAME_BOUND)
        if finding.verdict == "fail" and not stock_holds:
            finding.verdict = "stock"
        return finding

    def _as_stock_at_another_size(self, stock: Tensor) -> Finding:
        value = attempt(lambda: self._distance(self.caller.of_another_size(), stock), refusable=True)
        return value if isinstance(value, Finding) else at_most(value, SAME_BOUND)

    def _runs(self, compute: Callable[[], Tensor], stock_holds: bool) -> Finding:
        value = attempt(compute, refusable=True)
        if isinstance(value, Finding):
            if value.verdict == "fail" and not stock_holds:
                value.verdict = "stock"
            return value
        return Finding("pass")

    def _holds(self, compute: Callable[[], Tensor], expected: Tensor) -> bool:
        value = attempt(lambda: self._distance(compute(), expected))
        return not isinstance(value, Finding) and value <= SAME_BOUND

    def _distance(self, ours: Tensor, theirs: Tensor) -> float:
        if ours.shape != theirs.shape:
            return float("inf")
        return float((ours - theirs).abs().max()) / self.scale


def _equal(before: list[Tensor], after: list[Tensor]) -> Finding:
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    return Finding("pass" if same else "fail")


def _keep(outputs: list[Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        outputs.extend(one.detach().clone() for one in tensors_of(output)[:1])

    return hook
