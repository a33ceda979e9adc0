"""The subjects that are timed: whole models and single attention calls. Each can run in a phase and at a length."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache

from benchmarks.apart import Apart
from benchmarks.levels import LEVELS, SMOLLM2, SMOLLM2_LEVEL, Sizes, image_side
from benchmarks.machine import DTYPES
from hf_posenc import accept_cache

#: The model without positions, which all others are compared with, and the model with its own positions.
BARE, STOCK = "bare", "stock"
PHASES = ("forward", "train", "decode")
#: One token for each of sixteen sequences. Measured on request.
DECODE_BATCH = "decode_batch16"
#: Number of sequences in the phases that are one step after a cache. Their time grows at most linearly with the length.
DECODING = {"decode": 1, DECODE_BATCH: 16, "decode_compiled": 1}
#: Phases of compiled models, measured on request. A token is decoded with a static cache.
COMPILED = ("train_compiled", "decode_compiled")
#: Number of tokens that are decoded before the cache is filled again.
ROOM = 64
#: A cache of any length is extended from one that the model itself writes for this many tokens.
_SEED_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """Settings of all subjects of a run. The seed is for weights, tokens and the order of the subjects."""

    sizes: Sizes = field(default_factory=Sizes)
    smollm2: Sizes = SMOLLM2
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def at(self, level: str) -> Setting:
        """Returns the setting of one level, with its sizes in `sizes`."""
        sizes = self.smollm2 if level == SMOLLM2_LEVEL else LEVELS[level].sizes
        return self if sizes is None else dataclasses.replace(self, sizes=sizes)

    def random(self, *shape: int) -> Tensor:
        """Returns standard normal numbers, the same in every run."""
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))
        return numbers.to(self.device, DTYPES[self.dtype])

    def tokens(self, length: int, batch: int = 1) -> Tensor:
        """Returns `(batch, length)` token ids, the same in every run."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.sizes.vocab_size, (batch, length), generator=generator).to(self.device)


@dataclass(frozen=True)
class Call:
    """A prepared call of a subject. `run` is timed, and `after` restores the state from before it. `seconds` makes a
    call in another process and returns its time; `None` if the call is made in this process.
    """

    run: Callable[[], object]
    after: Callable[[], object] = lambda: None
    seconds: Callable[[], float] | None = None

    def once(self) -> None:
        """Runs, and restores the state."""
        self.run()
        self.after()


@dataclass
class Subject:
    """Something whose calls are timed in the context `around`. They are compared with those of `baseline`, the name of
    a subject of the same level, which may be itself. The family is "bare", "stock", "peer", or the kind of scheme.
    """

    name: str
    family: str
    setting: Setting
    baseline: str = BARE
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @contextlib.contextmanager
    def ready(self, phase: str, length: int) -> Iterator[Call]:
        """Yields a call of the subject in this phase and at this length."""
        with self.around():
            yield self.call(phase, length)

    def call(self, phase: str, length: int) -> Call:
        """Prepares the inputs, and everything that is built only once."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops everything that `call` has started."""


@dataclass
class LanguageModel(Subject):
    """A whole model: forward and training step on `length` tokens, or tokens after a cache of `length` tokens,
    which grows by at most `ROOM` tokens.
    """

    model: Any = None
    _apart: dict[tuple[str, int], Apart] = field(default_factory=dict)

    def call(self, phase: str, length: int) -> Call:
        """Prepares tokens and cache. A compiled model runs in a separate process."""
        if phase not in COMPILED:
            return Call(*self._prepared(self.model, phase, length))
        key = (phase, length)
        if key not in self._apart:
            kind = phase.removesuffix("_compiled")
            self._apart[key] = Apart(lambda: self._prepared(torch.compile(self.model), kind, length))
        elsewhere = self._apart[key].seconds
        return Call(elsewhere, seconds=elsewhere)

    def close(self) -> None:
        """Stops the processes of compiled models."""
        for apart in self._apart.values():
            apart.close()
        self._apart.clear()

    def _prepared(self, model: Any, phase: str, length: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Returns a call of the model, compiled or not, and a function that restores the state from before it."""
        self.model.train(phase == "train")
        if phase in DECODING:
            return self._decoding(model, length, DECODING[phase])
        tokens = self.setting.tokens(length)
        uncached = {"use_cache": False} if self.model.can_generate() else {}
        if phase == "train":
            return lambda: model(input_ids=tokens, labels=tokens, **uncached).loss.backward(), self.model.zero_grad
        return torch.no_grad()(lambda: model(input_ids=tokens, **uncached)), lambda: None

    @torch.no_grad()
    def _decoding(self, model: Any, length: int, batch: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Returns a call that decodes a token, and a function that fills the cache again after `ROOM` tokens."""
        static = StaticCache(config=self.model.config, max_cache_len=length + ROOM)

        def fill() -> Cache:
            if model is self.model:
                return self.filled_cache(length, batch)
            static.reset()
            self.model(input_ids=self.setting.tokens(length, batch), past_key_values=static, use_cache=True)
            return static

        cache, token = fill(), self.setting.tokens(1, batch)

        def after() -> None:
            nonlocal cache
            if int(cache.get_seq_length()) == length + ROOM:
                cache = torch.no_grad()(fill)()

        return torch.no_grad()(lambda: model(input_ids=token, past_key_values=cache, use_cache=True)), after

    def filled_cache(self, length: int, batch: int = 1) -> DynamicCache:
        """Returns a cache of `length` tokens in each of `batch` sequences.

        The model writes the first tokens itself, so that the tensors have the width and heads that this scheme caches.
        The rest repeats them, because times do not depend on the values.
        """
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            seed_tokens = self.setting.tokens(min(_SEED_TOKENS, length), batch)
            self.model(input_ids=seed_tokens, past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.keys, layer.values = _grown(layer.keys, length), _grown(layer.values, length)
        accept_cache(cache)
        return cache


def _grown(states: Tensor, length: int) -> Tensor:
    times = -(-length // states.shape[2])
    return states.repeat(1, 1, times, 1)[:, :, :length].contiguous()


@dataclass
class ImageClassifier(Subject):
    """A whole image model: forward and training step on one square image of `length` patches."""

    model: Any = None

    def call(self, phase: str, length: int) -> Call:
        """Sets the mode of the model and draws its image."""
        model, side = self.model.train(phase == "train"), image_side(length)
        pixels = self.setting.random(1, 3, side, side)
        if phase != "train":
            return Call(torch.no_grad()(lambda: model(pixel_values=pixels)))
        label = torch.zeros(1, dtype=torch.int64, device=self.setting.device)
        return Call(lambda: model(pixel_values=pixels, labels=label).loss.backward(), lambda: model.zero_grad())


@dataclass
class AttentionCall(Subject):
    """One causal attention call on queries, keys and values that are copies of one input, `(1, length, hidden)`.

    Args:
        build: returns, for a length, a function of the input whose output has the same shape. It is not timed.
        modules: modules whose mode is set, and whose gradients are dropped after each training step.
    """

    build: Callable[[int], Callable[[Tensor], Tensor]] = lambda length: lambda states: states
    modules: tuple[nn.Module, ...] = ()

    def call(self, phase: str, length: int) -> Call:
        """Prepares the input, and everything that the function builds only once."""
        for module in self.modules:
            module.train(phase == "train")
        states = self.setting.random(1, length, self.setting.sizes.hidden_size)
        attend = self.build(length)
        if phase != "train":
            return Call(torch.no_grad()(lambda: attend(states)))
        gradient = states.flip(1)
        states.requires_grad_()

        def after() -> None:
            states.grad = None
            for module in self.modules:
                module.zero_grad()

        return Call(lambda: attend(states).backward(gradient), after)
