"""Placing a scheme in a model and removing it: one object that plans, installs, suspends and undoes.

After an error or an interrupt, the model has either the complete old encoding or the complete new one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.entry import ATTRIBUTE, read_fields
from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Anatomy, Stack, refuse_remote_code, unwrapped
from hf_posenc.patching.anatomy.verification import refuse_hidden_positions, refuse_misread_causality
from hf_posenc.patching.anatomy.weights import computed_buffers, execution_device, parameter_count, samples
from hf_posenc.patching.call.cache_checks import refuse_in_stock
from hf_posenc.patching.call.runtime import unwrap_checkpointing
from hf_posenc.patching.forwards import refuse_foreign_forward
from hf_posenc.patching.place.config_entry import NATIVE_FIELDS, attach_entry, detach_entry, mark_names, remember
from hf_posenc.patching.place.encoding import (
    PositionEncoding,
    StackEncoding,
    build_encoding,
    current_encoding,
    encodings,
)
from hf_posenc.patching.place.generation import (
    CheckedContinuousBatching,
    CheckedGenerate,
    drop_kept_pages,
    refuse_running_batches,
)
from hf_posenc.patching.place.install import (
    PatchReport,
    StackReport,
    adopt_native,
    include_schemes,
    install_stack,
    refuse_late_parameters,
    split_heads,
)
from hf_posenc.patching.place.lengths import initialize_lengths, is_length_dependent
from hf_posenc.patching.place.record import Journal, OwnConfig
from hf_posenc.patching.place.stack_record import StacksInside
from hf_posenc.preserve import ordinary_context
from hf_posenc.schemes.arrangement.of_parts import of_parts
from hf_posenc.schemes.config import SchemeConfig, name_own_code


class Transaction:
    """All operations that change the position encoding of one model.

    Args:
        model: a transformers model, or a PEFT model around one.

    Raises:
        TypeError: for anything else.
        UnsupportedError: if no scheme can be placed in the model.

    Attributes:
        model: the transformers model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: PreTrainedModel = unwrapped(model)
        refuse_remote_code(self.model)
        self._anatomies: dict[int, tuple[nn.Module | None, Anatomy]] = {}

    @property
    def encoding(self) -> PositionEncoding | None:
        """The encoding in force, or `None` for a stock model."""
        return current_encoding(self.model)

    @property
    def anatomy(self) -> Anatomy:
        """The anatomy of the model, found once for each encoding in force, because it may hide native mechanisms."""
        # Kept with it, so that its id names no other encoding.
        placed = self.model.base_model._modules.get(ATTRIBUTE)
        if id(placed) not in self._anatomies:
            self._anatomies[id(placed)] = placed, Anatomy(self.model)
        return self._anatomies[id(placed)][1]

    def verified_stacks(self, part: str) -> list[Stack]:
        """The stacks of a part, after short runs have confirmed discovery.

        Patched stacks and models on the meta device are not run.

        Raises:
            UnsupportedError: if a stack was found to be causal and is not, or the other way round, or if positions act
                in it although every mechanism that was found is disabled.
        """
        anatomy = self.anatomy
        stacks = anatomy.stacks([part])
        if self.encoding is None and part not in anatomy.verified and anatomy.is_runnable:
            refuse_misread_causality(anatomy, stacks)
            refuse_hidden_positions(anatomy, stacks, self)
            anatomy.verified.add(part)
        return stacks

    @ordinary_context()
    def plan(
        self, config: SchemeConfig, stacks: list[Stack] | None = None, kept: Mapping[str, StackEncoding] | None = None
    ) -> PositionEncoding:
        """Builds the parts of a scheme, on the devices of their layers. The model is not changed.

        Args:
            config: the scheme, or the scheme of each part of the model.
            stacks: the stacks of those parts; found again if not given.
            kept: parts of the encoding in force that are used again, by name of the stack. Where layers were moved or
                exchanged since, new parts take over the parameters of the layers that are still there.
        """
        stacks, device = stacks or self.anatomy.stacks(config.part_names), execution_device(self.model)
        by_name = {stack.name: stack for stack in stacks}
        before = {name: self.encoding.record.stacks[name] for name in kept} if kept and self.encoding else {}
        moved = {name: placed for name, placed in before.items() if name in by_name and not placed.holds(by_name[name])}
        kept = {name: stack for name, stack in (kept or {}).items() if name not in moved}
        try:
            encoding = build_encoding(config, stacks, kept=kept)
        except Exception as error:
            name_own_code(error, config)
            raise
        parameters = (parameter for parameter in self.model.parameters() if parameter.is_floating_point())
        reference = next(parameters, None)
        encoding.to(dtype=None if reference is None else reference.dtype)
        computed = computed_buffers(encoding)
        encoding.to(device=device)
        for stack in stacks:
            encoding.stacks[stack.name].follow_layers(stack)
        if device.type == "meta":  # No checkpoint has their values.
            for module, name, buffer in computed:
                module._buffers[name] = buffer
        for name, placed in moved.items():
            placed.copy_parameters(encoding.stacks[name], by_name[name])
        return encoding

    def plan_alone(self, config: SchemeConfig, stacks: list[Stack]) -> PositionEncoding:
        """Builds the parts of a scheme of some stacks; other parts of the model have none."""
        whole = config if len(self.anatomy.parts) == 1 else of_parts({stack.part: config for stack in stacks})
        return self.plan(whole, stacks)

    def install(self, encoding: PositionEncoding) -> None:
        """Places an encoding in the model, replacing the one in force. If this fails, the model is left unchanged.

        Raises:
            UnsupportedError: if the encoding cannot be placed, if the one in force cannot be removed and restored, or
                while continuous batching runs on the model.
        """
        self.refuse_running()
        refuse_late_parameters(self.model, encoding)
        before = self.encoding
        self._refuse_foreign_forwards(encoding)
        # Layers may have been moved or dropped since.
        restored = before if before is None or self._holds(before) else self.plan(before.config, kept=before.stacks)
        try:
            self._replace_encoding(encoding)
        except BaseException:
            self._replace_encoding(restored)
            raise
        _refuse_caches_of([] if before is None else [before])

    def undo(self) -> None:
        """Removes the encoding from the model, even if it is interrupted.

        Raises:
            UnsupportedError: while continuous batching runs on the model.
        """
        self.refuse_running()
        before = encodings(self.model)
        try:
            self._replace_encoding(None)
        except BaseException:
            self._replace_encoding(None)
            raise
        _refuse_caches_of(before)

    @contextmanager
    def installed(self, encoding: PositionEncoding | None) -> Iterator[None]:
        """Context manager in which the model has another encoding, or none. On exit, the previous one is restored.

        Raises:
            UnsupportedError: if the encoding cannot be placed, if the one in force cannot be removed and restored,
                because the model was changed since, or while continuous batching runs on the model.
        """
        before = self.encoding
        if before is encoding:
            yield
            return
        if problem := self.change():
            raise UnsupportedError(f"This {type(self.model).__name__} was changed after it was patched: {problem}")
        self.refuse_running()
        self._refuse_foreign_forwards(cast("PositionEncoding", encoding or before))
        try:
            self._replace_encoding(encoding)
            yield
        finally:
            # Inlined, because an interrupt may arrive between the call of a function and its first line.
            try:
                self._replace_encoding(before)
            except BaseException:
                self._replace_encoding(before)
                raise

    @contextmanager
    def with_scheme(self, config: SchemeConfig, stacks: list[Stack]) -> Iterator[PositionEncoding]:
        """Context manager in which some stacks of a stock model compute a scheme, and nothing else is changed."""
        self.refuse_running()
        encoding = self.plan_alone(config, stacks)
        self._refuse_foreign_forwards(encoding)
        try:
            with ordinary_context():
                self._place_forwards(encoding, stacks)
            yield encoding
        finally:
            # Inlined, because an interrupt may arrive between the call of a function and its first line.
            try:
                _remove_encoding(encoding)
            except BaseException:
                _remove_encoding(encoding)
                raise

    @contextmanager
    def with_forwards(self, forwards: list[tuple[nn.Module, Any]]) -> Iterator[None]:
        """Context manager in which some modules have other forwards."""
        journal = Journal()
        try:
            for module, forward in forwards:
                journal.set_forward(module, forward)
            yield
        finally:
            try:
                journal.undo()
            except BaseException:
                journal.undo()
                raise

    @contextmanager
    def suspended(self) -> Iterator[PreTrainedModel]:
        """Context manager that yields the stock model. On exit, the scheme is restored.

        Raises:
            UnsupportedError: if another library has replaced a forward, so that the scheme could not be restored.
        """
        with self.installed(None):
            yield self.model

    def refuse_running(self) -> None:
        """Refuses to change the encoding while a call or continuous batching runs on the model."""
        refuse_running_batches(self.model)
        for encoding in encodings(self.model):
            if any(stack.runtime.states.in_progress for stack in encoding.stacks.values()):
                raise UnsupportedError(
                    f"A call of this {type(self.model).__name__} is in progress, in another thread or around this "
                    "line (a hook). It would run some layers with the old scheme and some with the new one. Change "
                    "the scheme between calls."
                )

    def _holds(self, encoding: PositionEncoding) -> bool:
        """Whether the layers in which an encoding was placed are still those of the model."""
        stacks = self.anatomy.stacks(encoding.config.part_names)
        return all(encoding.record.stacks[stack.name].holds(stack) for stack in stacks)

    def change(self) -> str:
        """Describes a change since the patch because of which the encoding could not be placed again; empty if none."""
        encoding = self.encoding
        problem = "" if encoding is None else encoding.record.agrees(self.model)
        if encoding is None or problem or self._holds(encoding):
            return problem
        return (
            "layers were added, dropped or moved after patch_model. Call patch_model again with the same scheme, which "
            "keeps the parameters of the layers that are still there."
        )

    def _refuse_foreign_forwards(self, encoding: PositionEncoding) -> None:
        """Refuses a model in which another library has replaced a forward that an encoding has to replace."""
        # In a short run of one stack, others of its part have no scheme.
        for stack in [each for each in self.anatomy.stacks(encoding.config.part_names) if each.name in encoding.stacks]:
            for site in (*stack.attentions, *stack.rotaries, *stack.layout.vector_sites(stack)):
                refuse_foreign_forward(site.module, f"{stack.path}.{site.path}".lstrip("."))
            for path in encoding.stacks[stack.name].cross:
                refuse_foreign_forward(stack.module.get_submodule(path), f"{stack.path}.{path}".lstrip("."))

    @ordinary_context()
    def _replace_encoding(self, encoding: PositionEncoding | None) -> None:
        """Removes every encoding from the model and places this one. A second call finishes an interrupted one."""
        drop_kept_pages(self.model)
        for previous in encodings(self.model):
            if encoding is not None:
                encoding.record.active_config = encoding.record.active_config or previous.record.active_config
            _remove_encoding(previous)
        if encoding is not None:
            self._place_encoding(encoding)

    def _place_encoding(self, encoding: PositionEncoding) -> None:
        """Places an encoding in a stock model. Every change is recorded in the encoding's journal.

        The model is marked as patched before the first change takes effect.
        """
        model, record, journal, anatomy = self.model, encoding.record, encoding.record.journal, self.anatomy
        stacks, base = anatomy.stacks(encoding.config.part_names), model.base_model
        _mark_as_patched(base, encoding)
        if record.active_config is None or not record.active_config.belongs_to(model):
            record.active_config = OwnConfig(model)
        record.active_config.place()
        attach_entry(record.active_config.config, encoding.config.to_dict())
        if base is not model:
            journal.set(model, ATTRIBUTE, encoding)
        reports = self._place_forwards(encoding, stacks)
        if any(stack.module is not model for stack in stacks):
            journal.add_forward_pre_hook(model, StacksInside(model, [stack.module for stack in stacks]))
        untouched = [part for part in anatomy.parts if part not in {stack.part for stack in stacks}]
        label, kind = encoding.config.label, type(model).__name__
        encoding.report = PatchReport(label, kind, parameter_count(encoding), reports, untouched)
        placed = {id(stack.module): encoding.stacks[stack.name] for stack in stacks}
        with_parameters = {key: parts for key, parts in placed.items() if next(parts.parameters(), None) is not None}
        if with_parameters:
            include_schemes(base, with_parameters, journal)
        for stack_record in record.stacks.values():
            stack_record.note_trainable()
        initialize_lengths(encoding, model, stacks, anatomy.main)
        fields = {path: stack_record.fields for path, stack_record in record.stacks_by_path().items()}
        remember(record.active_config.config, NATIVE_FIELDS, fields)
        record.active_config.fields = copy.deepcopy(read_fields(record.active_config.config))
        record.base_weights = record.base_weights or samples(model, read_offloaded=False)
        mark_names(model, encoding)
        generation_config = getattr(model, "generation_config", None)
        if generation_config is not None:
            if is_length_dependent(encoding):
                journal.set(generation_config, "use_cache", False)
            CheckedGenerate.place(encoding, model)
        CheckedContinuousBatching.place(encoding, model)
        encoding.train(model.training)

    def _place_forwards(self, encoding: PositionEncoding, stacks: list[Stack]) -> list[StackReport]:
        """Makes stacks of a stock model compute an encoding. Returns what was replaced and placed."""
        _mark_as_patched(self.model.base_model, encoding)
        reports = []
        for stack in stacks:
            placed = encoding.stacks[stack.name]
            if placed.adopted is None:
                placed.adopted = adopt_native(placed, stack)
            placed.runtime.recomputation.removed = False
            report = install_stack(stack, placed, encoding.record)
            report.adopted = placed.adopted
            reports.append(report)
        split_heads(encoding, self.model)
        return reports


def _mark_as_patched(base: nn.Module, encoding: PositionEncoding) -> None:
    """Adds an encoding to the base model, by which it is found and removed after an interrupt."""
    encoding.__dict__["holder"] = base
    base.add_module(ATTRIBUTE, encoding)


def _refuse_caches_of(removed: list[PositionEncoding]) -> None:
    """Makes the caches that encodings have filled refuse tokens of the stock model."""
    for encoding in removed:
        for stack in encoding.stacks.values():
            refuse_in_stock(stack.runtime.scheme)


def _remove_encoding(encoding: PositionEncoding) -> None:
    """Reverts every change that an encoding has made. After an interrupt, a second call finishes it."""
    for stack in encoding.stacks.values():
        stack.runtime.slots.restore()
        stack.runtime.watch = stack.runtime.pages = stack.runtime.replicas = stack.runtime.viewed = None
        stack.runtime.recomputation.removed = True
    for placed in encoding.record.stacks.values():
        placed.prepare_removal()
    encoding.record.journal.undo()
    holder, active = encoding.__dict__.get("holder"), encoding.record.active_config
    if active is not None:
        detach_entry(active.config, active.fields)
        active.remove()
    if holder is not None:
        unwrap_checkpointing(holder)
        holder._modules.pop(ATTRIBUTE, None)
    encoding.__dict__.pop("holder", None)
