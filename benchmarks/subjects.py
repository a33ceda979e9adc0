"""What is timed: each subject knows how to get ready for a phase and a length, and then to run once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from benchmarks.machine import DTYPES

PHASES = ("forward", "train", "decode")
#: Sixteen sequences get a token each; measured where it is asked for.
DECODE_BATCH = "decode_batch16"
_BATCHES = {"decode": 1, DECODE_BATCH: 16}
#: A cache of any length is grown from what the model itself writes for so many tokens.
_SEED_TOKENS = 16


@dataclass(frozen=True)
class Sizes:
    """Of all models; a head has `hidden_size / num_heads` dimensions, and keys and values have `num_heads` heads unless
    `num_key_value_heads` says otherwise.
    """

    hidden_size: int = 512
    num_layers: int = 6
    num_heads: int = 8
    intermediate_size: int = 1376
    vocab_size: int = 256
    num_key_value_heads: int | None = None


#: The shape of HuggingFaceTB/SmolLM2-135M, as its config has it.
SMOLLM2 = Sizes(
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    intermediate_size=1536,
    vocab_size=49152,
    num_key_value_heads=3,
)
_SMOLLM2_SIZES = dataclasses.asdict(SMOLLM2)


def has_smollm2_shape(settings: Mapping[str, Any]) -> bool:
    """Whether the level "smollm2" of a run has that shape, and not a smaller one that only shows that it runs.

    Args:
        settings: of the run, JSON-ready; without sizes of that level they are those of `SMOLLM2`.
    """
    return bool(settings.get("smollm2", _SMOLLM2_SIZES) == _SMOLLM2_SIZES)


@dataclass(frozen=True)
class Setting:
    """What all subjects of a run share.

    Args:
        sizes: of the models.
        smollm2: the sizes at the level "smollm2".
        device: "cpu" or "cuda".
        dtype: of weights and activations, "float32" or "bfloat16".
        seed: of weights, tokens and the order of the subjects.
    """

    sizes: Sizes = field(default_factory=Sizes)
    smollm2: Sizes = SMOLLM2
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def at(self, level: str) -> Setting:
        """The setting of one level, with its sizes in `sizes`."""
        return dataclasses.replace(self, sizes=self.smollm2) if level == "smollm2" else self

    def random(self, *shape: int) -> Tensor:
        """Standard normal numbers, the same ones in every run."""
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))
        return numbers.to(self.device, DTYPES[self.dtype])

    def tokens(self, length: int, batch: int = 1) -> Tensor:
        """`(batch, length)`, the same ones in every run."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.sizes.vocab_size, (batch, length), generator=generator).to(self.device)


@dataclass(frozen=True)
class Call:
    """One call of a subject that is ready.

    Args:
        run: what is timed.
        after: brings everything back to where it was before; not timed.
    """

    run: Callable[[], object]
    after: Callable[[], object] = lambda: None

    def once(self) -> None:
        """Runs, and cleans up."""
        self.run()
        self.after()


def decodes(phase: str) -> bool:
    """Whether a phase is a step behind a cache, whose time grows no faster than its length."""
    return phase in _BATCHES


class Subject(Protocol):
    """Something whose calls are timed."""

    name: str
    #: What it is measured against: the name of another subject of the same level. Its own name for a baseline.
    baseline: str
    #: "bare", "stock", "peer", or what kind of scheme it is.
    family: str

    def ready(self, phase: str, length: int) -> AbstractContextManager[Call]:
        """Within it, the subject can be called at this phase and length."""


@dataclass
class LanguageModel:
    """A whole model: forward and training step on `length` tokens, or one token behind a cache of `length`.

    Args:
        name: of the subject.
        family: of the subject.
        model: with a language modelling head.
        setting: of the run.
        baseline: what it is measured against.
        around: a context in which it runs.
    """

    name: str
    family: str
    model: Any
    setting: Setting
    baseline: str = "bare"
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @contextlib.contextmanager
    def ready(self, phase: str, length: int) -> Iterator[Call]:
        """Within it, the model is in the right mode and its inputs are there."""
        self.model.train(phase == "train")
        with self.around():
            if phase in _BATCHES:
                yield self._decode(length, _BATCHES[phase])
            else:
                yield {"forward": self._forward, "train": self._train}[phase](length)

    @property
    def _uncached(self) -> dict[str, Any]:
        return {"use_cache": False} if self.model.can_generate() else {}

    def _forward(self, length: int) -> Call:
        tokens = self.setting.tokens(length)

        def run() -> None:
            with torch.no_grad():
                self.model(input_ids=tokens, **self._uncached)

        return Call(run)

    def _train(self, length: int) -> Call:
        tokens = self.setting.tokens(length)

        def run() -> None:
            self.model(input_ids=tokens, labels=tokens, **self._uncached).loss.backward()

        return Call(run, self.model.zero_grad)

    def _decode(self, length: int, batch: int) -> Call:
        cache = self.filled_cache(length, batch)
        token = self.setting.tokens(1, batch)

        def run() -> None:
            with torch.no_grad():
                self.model(input_ids=token, past_key_values=cache, use_cache=True)

        return Call(run, lambda: cache.crop(-1))

    def filled_cache(self, length: int, batch: int = 1) -> DynamicCache:
        """A cache of `length` tokens in each of `batch` sequences.

        The model writes the first tokens itself, so that the tensors have whatever width and heads this scheme caches;
        the rest repeats them, since no time depends on the values.
        """
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            seed_tokens = self.setting.tokens(min(_SEED_TOKENS, length), batch)
            self.model(input_ids=seed_tokens, past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.keys, layer.values = _grown(layer.keys, length), _grown(layer.values, length)
        return cache


def _grown(states: Tensor, length: int) -> Tensor:
    times = -(-length // states.shape[2])
    return states.repeat(1, 1, times, 1)[:, :, :length].contiguous()


@dataclass
class AttentionCall:
    """One causal attention call on queries, keys and values that are copies of one input, `(1, length, hidden)`.

    Args:
        name: of the subject.
        family: of the subject.
        baseline: what it is measured against.
        build: from a length to a function of the input with an output of its shape.
        setting: of the run.
        modules: whose gradients are dropped after each training step.
        around: a context in which it runs.
    """

    name: str
    family: str
    baseline: str
    build: Callable[[int], Callable[[Tensor], Tensor]]
    setting: Setting
    modules: tuple[nn.Module, ...] = ()
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @contextlib.contextmanager
    def ready(self, phase: str, length: int) -> Iterator[Call]:
        """Within it, the input is there, and whatever the function builds once."""
        for module in self.modules:
            module.train(phase == "train")
        states = self.setting.random(1, length, self.setting.sizes.hidden_size)
        with self.around():
            attend = self.build(length)
            yield self._train(attend, states) if phase == "train" else self._forward(attend, states)

    def _forward(self, attend: Callable[[Tensor], Tensor], states: Tensor) -> Call:
        def run() -> None:
            with torch.no_grad():
                attend(states)

        return Call(run)

    def _train(self, attend: Callable[[Tensor], Tensor], states: Tensor) -> Call:
        gradient = states.flip(1)
        states.requires_grad_()

        def run() -> None:
            attend(states).backward(gradient)

        def after() -> None:
            states.grad = None
            for module in self.modules:
                module.zero_grad()

        return Call(run, after)
