"""The needs of the parts of a scheme, and the comparison with what an environment lacks.

An environment is anything that runs or carries a scheme: a cache, an attention kernel, a kind of layer, a way to split
a model, an engine, a format of exports. `hf_posenc.schemes.refusals` lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from hf_posenc.errors import UnsupportedError
from hf_posenc.schemes.parts import (
    AdditiveEncoding,
    DistanceBias,
    LogitBias,
    LogitScale,
    PairwiseBias,
    Part,
    QueryKeyMap,
    feature_counts,
)
from hf_posenc.schemes.rotary.contextual import rotation_before_cache


class Need(Enum):
    """Something that a part does and some environments forbid. The value continues a sentence that begins with "it"."""

    VECTORS = "adds vectors to the embeddings"
    MAP = "changes queries and keys by their position"
    WIDE_HEADS = "makes queries and keys wider"
    SECOND_MAP = "rotates distant pairs a second time, in the first dimensions of whole heads"
    KEYS_OF_LAYER = "changes keys of each layer when the cache is updated"
    ROTATION_BY_INPUT = "rotates queries and keys by the input of their layer"
    SLOPES = "adds a bias to the logits that is linear in the distance"
    KEY_TERMS = "adds a value per key to the logits"
    BIAS = "adds a bias to the logits"
    SCALED_BIAS = "scales its bias for each query"
    CORRECTED_LOGITS = "corrects logits with a bias"
    FEATURES = "stores features of each token next to its key"
    OLDEST_KEYS = "combines features of neighbouring tokens"
    TOKENS_BETWEEN = "sums over the tokens between query and key"
    SCALE = "scales the logits by the position of the query"
    LENGTH = "depends on the length of the sequence"
    ALL_TOKENS = "depends on tokens that a cache does not store"
    WHOLE_POSITIONS = "rotates by integer positions only"
    COORDINATES = "reads rows and columns"
    PARAMETERS = "has parameters"
    CROSS = "acts in cross-attention"


#: The kinds of bias. A part has one of them at most.
BIASES = (Need.SLOPES, Need.KEY_TERMS, Need.BIAS)
#: Parts that act in the attention of a layer.
IN_ATTENTION = (Need.MAP, Need.ROTATION_BY_INPUT, *BIASES, Need.SCALE)
#: The kinds of parts for which a format needs a place, with the name of that place.
KINDS = {
    Need.VECTORS: "vectors",
    Need.MAP: "map",
    Need.ROTATION_BY_INPUT: "map",
    **dict.fromkeys(BIASES, "logit bias"),
    Need.SCALE: "logit scale",
    Need.CROSS: "scheme in cross-attention",
}
#: A growing cache is wrong for schemes with one of these.
NO_GROWING_CACHE = (Need.LENGTH, Need.ALL_TOKENS)


def needs_of(parts: Iterable[Part]) -> dict[Need, Part]:
    """The needs of the parts that act together at one place, each with the first part that has it.

    Args:
        parts: those of one layer, or the vectors added before the first layer.
    """
    parts = list(parts)
    needs: dict[Need, Part] = {}
    for part in parts:
        for need in _needs_of_part(part):
            needs.setdefault(need, part)
    if Need.SCALE in needs and (scaled := [needs[kind] for kind in BIASES if kind in needs]):
        needs[Need.SCALED_BIAS] = scaled[0]
    return needs


def _needs_of_part(part: Part) -> Iterator[Need]:
    if isinstance(part, AdditiveEncoding):
        yield Need.VECTORS
    elif isinstance(part, QueryKeyMap):
        yield Need.MAP
        if part.width_factor != 1:
            yield Need.WIDE_HEADS
        if part.mapped_again:
            yield Need.SECOND_MAP
        if part.whole_heads or not part.symmetric:
            yield Need.KEYS_OF_LAYER
        if any(getattr(module, "whole_positions", False) for module in part.modules()):
            yield Need.WHOLE_POSITIONS
    elif isinstance(part, LogitBias):
        yield from _needs_of_bias(part)
    elif isinstance(part, LogitScale):
        yield Need.SCALE
    modules = list(part.modules())
    for need, flag in _DECLARED.items():
        if any(getattr(module, flag, False) for module in modules):
            yield need
    if next(part.parameters(), None) is not None:
        yield Need.PARAMETERS


#: Needs that a part, or one inside it, declares with an attribute.
_DECLARED = {
    Need.LENGTH: "length_dependent",
    Need.ALL_TOKENS: "needs_whole_sequence",
    Need.COORDINATES: "reads_coordinates",
    Need.TOKENS_BETWEEN: "sums_tokens",
}


def _needs_of_bias(bias: LogitBias) -> Iterator[Need]:
    rotations = [summand.rotates_heads for summand in bias.summands()]
    if any(rotations):
        yield Need.ROTATION_BY_INPUT
    if isinstance(bias, DistanceBias) and bias.states_slopes and bias.slopes_behind(torch.device("cpu")) is not None:
        yield Need.SLOPES
    elif bias.separable:
        yield Need.KEY_TERMS
    elif not all(rotations):
        yield Need.BIAS
    if any(feature_counts(bias)):
        yield Need.KEYS_OF_LAYER
        rotation = rotation_before_cache(bias.summands())
        if rotation is None or not rotation.angles_of_own_token:
            yield Need.FEATURES
    if isinstance(bias, PairwiseBias) and bias.needs_oldest_keys:
        yield Need.OLDEST_KEYS
    # A rotation by the input is applied to the heads where logits are capped.
    others = (summand for summand, rotates in zip(bias.summands(), rotations, strict=True) if not rotates)
    if any(getattr(summand, "replaces_logits", False) for summand in others):
        yield Need.CORRECTED_LOGITS


@dataclass(frozen=True)
class Environment:
    """Something that runs a scheme or carries it, and what it lacks.

    Args:
        name: subject of a message: "vLLM".
        lacks: why each of these needs is not met, as a clause that continues "it adds a bias to the logits, ".
        remedy: what to do instead, as sentences.
    """

    name: str
    lacks: Mapping[Need, str]
    remedy: str = ""

    @classmethod
    def giving(cls, name: str, gives: Collection[Need]) -> Environment:
        """A format or program that has a place for some kinds of parts and for no other.

        Args:
            name: as above.
            gives: some of `KINDS`.
        """
        lacks = {kind: f"and {name} has no such {place} here" for kind, place in KINDS.items() if kind not in gives}
        return cls(name, lacks)

    def problem(self, needs: Mapping[Need, Part]) -> str:
        """Why it cannot run a scheme with some needs, as a clause about the scheme; empty if it can."""
        for need, reason in self.lacks.items():
            if need in needs:
                return f"it {need.value} ({type(needs[need]).__name__}), {reason}"
        return ""

    def refuse(self, needs: Mapping[Need, Part], subject: str) -> None:
        """Raises an error if it cannot run a scheme.

        Args:
            needs: those of the scheme.
            subject: whose scheme that is, in words.

        Raises:
            UnsupportedError: naming the part, the reason and the remedy.
        """
        if refusal := self.refusal(needs, subject):
            raise UnsupportedError(refusal)

    def refusal(self, needs: Mapping[Need, Part], subject: str) -> str:
        """The message of `refuse`; empty if it can run the scheme."""
        problem = self.problem(needs)
        return self.message(problem, subject) if problem else ""

    def message(self, problem: str, subject: str) -> str:
        """A refusal for a problem that was found before."""
        return f"{self.name} cannot run {subject}: {problem}. {self.remedy}".rstrip()


def generation_problems(
    engines: Iterable[Environment], cache: Environment, needs: Mapping[Need, Part], parts: Iterable[Part]
) -> dict[str, str]:
    """The reason why a way to generate cannot run a scheme, by its name, as a clause about the scheme; empty if it can.

    Args:
        engines: programs that keep keys.
        cache: the growing cache of transformers.
        needs: what the parts need.
        parts: the parts of the scheme.
    """
    problems = {engine.name: engine.problem(needs) for engine in engines}
    for part in parts:
        try:
            part.check_cache(1, 2)
        except UnsupportedError as error:
            problems = {name: problem or str(error).rstrip(".") for name, problem in problems.items()}
            break
    return problems | {cache.name: cache.problem(needs)}
