"""The cache of a call: which argument it is, how long it is, and what is known about it and about its keys.

Notes about a cache are stored in a table and not on the cache, because tools such as exporters and converters walk its
attributes, and an exported program compares them. The notes follow `copy`, `deepcopy` and `pickle`, because the reducer
of the cache's class takes them along. A compiled graph cannot read the table. It uses an attribute of the cache, which
applies until the next note outside of a graph.

Usually the positions of cached tokens follow from the attention mask or from their slots. If the caller passed other
`position_ids`, they are noted. Other code may reorder, select, repeat or crop the cached rows, with or without the
cache's methods. The keys show such changes, and the positions are changed in the same way.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.generation.continuous_batching import PagedAttentionCache

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.forwards import unknown_seam
from hf_posenc.schemes.config import SchemeConfig
from hf_posenc.schemes.weights import KeptValues, exporting, traced

_KEPT = "_hf_posenc_kept"
#: By the identity of the cache, because a class of caches may define equality.
_table: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}


def note_of(cache: Any, name: str) -> Any:
    """A note about a cache, or `None`."""
    of_graph = getattr(cache, name, None)
    if of_graph is not None or torch.compiler.is_compiling():
        return of_graph
    kept = _table.get(id(cache))
    return None if kept is None else kept[1].get(name)


def set_note(cache: Any, name: str, value: Any) -> None:
    """Sets a note, unless the type of the cache has no attributes, as a list. An exported program keeps none.

    Args:
        cache: the cache.
        name: the name of the attribute in a graph.
        value: anything that can be copied and pickled, and does not refer to the cache.
    """
    if getattr(cache, "__dict__", None) is None or exporting():
        return
    if torch.compiler.is_compiling():
        setattr(cache, name, value)
        return
    vars(cache).pop(name, None)
    _, notes = _table.get(id(cache)) or _keep(cache, _Notes())
    notes[name] = value


def kept_values(cache: Any, starts: bool, trainings: int) -> KeptValues:
    """The values that decoding steps with this cache reuse: they follow from weights, or are biases of distances.

    They are dropped where a text `starts`, and after another of `trainings`, because some changes of a weight cannot be
    detected, such as one by `weight.data`.
    """
    kept: KeptValues | None = None if starts else note_of(cache, _KEPT)
    if kept is None or kept.trainings != trainings:
        kept = KeptValues()
        kept.trainings = trainings
        set_note(cache, _KEPT, kept)
    return kept


def caches_with(name: str, value: Any) -> list[Any]:
    """The caches with this very note, unless a graph has set it."""
    caches = [reference() for reference, notes in list(_table.values()) if notes.get(name) is value]
    return [cache for cache in caches if cache is not None and note_of(cache, name) is value]


class _Notes(dict[str, Any]):
    """The notes about one cache. A scheme is known by its identity, so a copy of the cache has the same one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Notes:
        return _Notes(
            (name, value if isinstance(value, SchemeConfig) else copy.deepcopy(value, memo))
            for name, value in self.items()
        )


def _keep(cache: Any, notes: dict[str, Any]) -> tuple[weakref.ref[Any], dict[str, Any]]:
    key, kind = id(cache), type(cache)
    kept = _table[key] = weakref.ref(cache, lambda _: _table.pop(key, None)), notes
    reducer = copyreg.dispatch_table.get(kind)
    if not isinstance(reducer, _Reducer):
        copyreg.pickle(kind, _Reducer(reducer))
    return kept


class _Reducer:
    """Reduces a cache for `copy` and `pickle`, together with its notes; `inner` is the reducer of its class, if any."""

    def __init__(self, inner: Callable[[Any], Any] | None) -> None:
        self.inner = inner

    def __call__(self, cache: Any) -> Any:
        """What `__reduce_ex__` returns, with another function that makes the cache."""
        reduced = cache.__reduce_ex__(2) if self.inner is None else self.inner(cache)
        kept = _table.get(id(cache))
        return reduced if kept is None else (functools.partial(_made, reduced[0]), (kept[1], *reduced[1]), *reduced[2:])


def _made(make: Callable[..., Any], notes: dict[str, Any], *args: Any) -> Any:
    cache = make(*args)
    _keep(cache, notes)
    return cache


#: Argument of XLNet's stack: a list of tensors, which only this name distinguishes from other lists.
_MEMORY = "mems"
_LENGTH = "_hf_posenc_length"
#: Types of most arguments, which are recognised faster by type than by their methods.
_NO_CACHES = (Tensor, type(None), bool, int, float, str, tuple)
#: Base class of the layers of a quantised cache.
QUANTISED_LAYER = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


def cache_among(arguments: dict[str, Any]) -> Any:
    """Returns the cache among the arguments of a stack, or `None`."""
    cache = first_cache(arguments.values())
    return arguments.get(_MEMORY) if cache is None else cache


def cache_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], of_stack: Any) -> Any:
    """The cache that a layer updates, or `None`. For an encoder-decoder cache, its self-attention cache.

    `of_stack` is that of the stack's call, which nearly every layer is given.
    """
    values = (*args, *kwargs.values())
    for value in values:
        if value is of_stack is not None:
            return self_attention_cache(value)
    return self_attention_cache(first_cache(values))


def cache_argument(model: nn.Module) -> str:
    """The name of the argument in which a model takes its cache: the one that is annotated as a cache."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    name = next((parameter.name for parameter in parameters if "Cache" in str(parameter.annotation)), None)
    if name is None:
        raise unknown_seam(
            f"The forward of {type(model).__name__} has no argument that is annotated as a cache.", model
        )
    return name


def first_cache(values: Iterable[Any]) -> Any:
    """The first value that is a cache, or `None`. Its argument has another name in each architecture and version."""
    return next((value for value in values if not isinstance(value, _NO_CACHES) and is_cache(value)), None)


def is_cache(value: Any) -> bool:
    """Whether a value is a cache, by what it can do."""
    # A cache of continuous batching has no length, because every request has its own.
    counts = hasattr(value, "update") and hasattr(value, "get_seq_length")
    return counts or isinstance(value, PagedAttentionCache)


def heads_first(read: Tensor) -> Tensor:
    """What a cache has read, `(1, key_value_heads, all keys, width)`. With 5.17 it is `(all keys, heads, width)`."""
    return read.transpose(0, 1).unsqueeze(0) if read.dim() == 3 else read


def states_positions(cache: Any) -> bool:
    """Whether a cache states the positions of its keys, because it may have dropped some (`evicting_cache`)."""
    keeper = getattr(cache, "self_attention_cache", cache)
    layers = getattr(keeper, "layers", ())
    return hasattr(keeper, "expect_positions") or any(hasattr(layer, "key_positions") for layer in layers)


def drops_keys(cache: Any) -> bool:
    """Whether a cache holds fewer keys than it has seen and has no window, so that it is unknown which."""
    for layer in getattr(self_attention_cache(cache), "layers", ()):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and not (getattr(layer, "is_sliding", False) or isinstance(layer, QUANTISED_LAYER)):
            length = layer.get_seq_length()
            if isinstance(length, int) and keys.shape[-2] < length:
                return True
    return False


def self_attention_cache(cache: Any) -> Any:
    """The self-attention cache of an encoder-decoder cache, which receives all its row operations."""
    return getattr(cache, "self_attention_cache", cache)


def _of_static_layer(cache: Any, length: Tensor) -> int | Tensor:
    """The length in a tensor, which a static layer increments in place before its attention runs.

    Outside of graphs it is read from the device once. Later calls count on until somebody else has written to it.
    """
    if traced() or length.is_meta or length.is_inference():
        return length.clone()
    counted = note_of(self_attention_cache(cache), _LENGTH)
    return counted[1] if counted and counted[0] == _state(length) else int(length)


def remember_length(cache: Any, length: int | None) -> None:
    """Stores, at the end of a call, the length of a cache whose layers keep it in a tensor. A graph cannot read it."""
    keeper = self_attention_cache(cache)
    kept = keeper.get_seq_length() if hasattr(keeper, "get_seq_length") else None
    if isinstance(kept, Tensor):
        readable = not traced() and not kept.is_inference() and length is not None
        set_note(keeper, _LENGTH, (_state(kept), length) if readable else False)


def _state(length: Tensor) -> tuple[int, int]:
    return length.data_ptr(), length._version


def cached_length(cache: Any) -> int | Tensor | None:
    """Number of slots filled before this call; `None` if the cache does not provide it."""
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        length = cache.get_seq_length()
        return _of_static_layer(cache, length) if isinstance(length, Tensor) else length
    if isinstance(cache, list | tuple) and cache and isinstance(cache[0], Tensor):
        return int(cache[0].shape[0])
    return None


class Generation:
    """A call of `generate` that was given no `position_ids`: they are counted over its mask, to which it appends ones.

    Each step assumes this and compares it on the device. The result is read once, at the end.
    """

    def __init__(self) -> None:
        #: The ids of the caches that it has filled, which therefore hold nothing else.
        self.caches: set[int] = set()
        self._differs: dict[torch.device, Tensor] = {}

    def compare(self, differs: Tensor) -> None:
        """Keeps a 0-dim bool: whether a step had other positions, or a mask that hides a new token."""
        known = self._differs.get(differs.device)
        self._differs[differs.device] = differs if known is None else known | differs

    def check(self) -> None:
        """Reads what was compared."""
        if any(map(bool, self._differs.values())):
            raise UnsupportedError(
                "A call of the model in `generate` had position_ids that differ from the count over its mask, or a "
                "mask that hides a new token, although `generate` was given no position_ids. A logits processor, or "
                "other code in the loop, passes its own. Pass position_ids to `generate`: the position_ids of each "
                "step are then read."
            )


#: The call in progress.
GENERATION: ContextVar[Generation | None] = ContextVar("hf_posenc_generation", default=None)


def counted_tokens(mask: Tensor) -> Tensor:
    """`(batch, key_len)` int64: 0, 1, 2, ... over the real tokens of each row, -1 at padding.

    Any number but 0 marks a real token, as in transformers' masks.
    """
    real = mask.bool().to(torch.int64)
    return real.cumsum(-1) * real - 1


_POSITIONS = "_hf_posenc_positions"
#: The attribute of a cache that informs a compiled graph about positions that it cannot read.
_GIVEN = "_hf_posenc_given_positions"
#: The attribute of a cache that a compiled graph has continued, whose keys are therefore not those that were seen.
_CONTINUED = "_hf_posenc_continued"
#: Numbers of each key that are compared. Equal keys of different tokens are as unlikely as equal floats.
_COMPARED = 4


@dataclass
class CachedPositions:
    """The recorded positions of the tokens in a cache.

    Args:
        length: number of slots with known positions; a 0-dim tensor for static caches.
        ids: `(batch or 1, length)` int64 positions if they differ from those implied by the mask or the slots, else
            `None`.
        unknown: 0-dim bool tensor, true if positions differ but were not recorded. Set by compiled graphs, which cannot
            inspect position values.
        keys: the cached keys at the end of the last complete call; `None` after a compiled call.
        mask: `(batch, length)`, the padding mask over which the positions were counted, if `ids` is `None`; `None` if
            they follow from the slots.
        by_next_mask: whether they are counted over the mask of the next call instead.
        even: whether all real tokens are as far apart as their slots; `None` if this was not checked.
        evicted: whether the cache dropped some of the tokens while it took in the new ones.
    """

    length: int | Tensor
    ids: Tensor | None = None
    unknown: Tensor | None = None
    keys: SeenKeys | None = None
    mask: Tensor | None = None
    by_next_mask: bool = False
    even: bool | None = None
    evicted: bool = False

    def at(self, slots: Tensor) -> Tensor:
        """`(batch or 1, slots)`: the positions of the tokens in these slots; -1 at padding."""
        if self.ids is not None:
            return self.ids.to(slots.device).index_select(1, slots.clamp(max=self.ids.shape[1] - 1))
        if self.mask is None:
            return slots.unsqueeze(0)
        counted = counted_tokens(self.mask.to(slots.device))
        return counted.index_select(1, slots.clamp(max=counted.shape[1] - 1))


class SeenKeys:
    """The keys of a cache at one moment, by which later changes are detected.

    Args:
        keys: of the layers that have keys; at least one. `None` for one that no longer exists.
        length: the cached length of the last layer if it is a number, or `None`.
        window: the window of the last layer, which keeps one key less; 0 if it keeps all.
        last: the keys of the last layer.
        written: for each layer, whether other code has written to its keys since.
    """

    def __init__(
        self, keys: Sequence[Tensor | None], length: int | None, window: int, last: Tensor, written: Sequence[bool]
    ) -> None:
        # Only one layer is kept in memory until the next call.
        self.last = last
        self.length = length
        self.window = window
        self.each = [
            ((lambda: None) if tensor is None else weakref.ref(tensor), None if late else _writes(tensor))
            for tensor, late in zip(keys, written, strict=True)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of the cache contain copies of its keys, with their own count of writes.
        keys = [reference() for reference, _ in self.each]
        written = [_writes(tensor) != state for tensor, (_, state) in zip(keys, self.each, strict=True)]
        return SeenKeys, (keys, self.length, self.window, self.last, written)

    def still_in(self, keys: list[Any]) -> bool:
        """Whether these are the same keys, and nobody has written to them."""
        if len(keys) != len(self.each):
            return False
        pairs = zip(keys, self.each, strict=True)
        return all(tensor is reference() and _writes(tensor) == state for tensor, (reference, state) in pairs)


def recorded(cache: Any) -> CachedPositions | None:
    """The positions recorded on a cache, or `None`."""
    return note_of(self_attention_cache(cache), _POSITIONS)


def has_given_positions(cache: Any) -> bool:
    """Whether the cache has positions that a compiled graph cannot read: they were recorded, or it states them."""
    return getattr(self_attention_cache(cache), _GIVEN, False) or states_positions(cache)


def record(cache: Any, positions: CachedPositions) -> None:
    """Records positions on a cache, unless its type does not allow attributes."""
    keeper = self_attention_cache(cache)
    if getattr(keeper, "__dict__", None) is None:
        return
    if positions.keys is None and not traced():
        # A call that fails leaves tokens in some layers, which are not those of the last complete call.
        positions.keys = getattr(recorded(keeper), "keys", None)
    set_note(keeper, _POSITIONS, positions)
    if positions.ids is not None:
        setattr(keeper, _GIVEN, True)
    elif getattr(keeper, _GIVEN, False):
        delattr(keeper, _GIVEN)


def remember_keys(cache: Any) -> None:
    """Stores, at the end of a call, the keys that the recorded positions belong to."""
    keeper = self_attention_cache(cache)
    if traced():
        set_note(keeper, _CONTINUED, True)
        return
    known, generation = recorded(keeper), GENERATION.get()
    if known is not None:
        known.keys = seen = _seen(keeper)
        left = None if seen is None else seen.length
        known.evicted = left is not None and isinstance(known.length, int) and left < known.length
    if generation is not None:
        generation.caches.add(id(keeper))
    if note_of(keeper, _CONTINUED):
        delattr(keeper, _CONTINUED)


def matches_keys(cache: Any) -> bool:
    """Whether the positions that were recorded are those of the keys in the cache; true if none were recorded.

    If rows were reordered, selected, repeated or cropped, the recorded positions are changed in the same way.
    """
    keeper = self_attention_cache(cache)
    known: CachedPositions | None = None if traced() or note_of(keeper, _CONTINUED) else note_of(keeper, _POSITIONS)
    if known is None or known.keys is None or (known.keys.still_in(_keys(cache)) and not known.evicted):
        return True
    if known.evicted:
        return False
    seen = _seen(cache)
    generation = GENERATION.get()
    if generation is not None and known.ids is None and id(keeper) in generation.caches:
        # Beams of one prompt have the same mask, so it does not matter how `generate` has reordered them.
        followed: CachedPositions | None = dataclasses.replace(known, keys=seen, mask=None, by_next_mask=True)
    else:
        followed = _followed(known, known.keys, seen, _keys(cache))
    if followed is not None:
        record(cache, followed)
    return followed is not None


def _followed(
    known: CachedPositions, before: SeenKeys, seen: SeenKeys | None, keys: list[Tensor]
) -> CachedPositions | None:
    """The positions of the keys that are in a cache now, or `None` if they are not rows of those before."""
    # An operation on the whole cache gives every layer other keys.
    known_keys = [reference() for reference, _ in before.each]
    if seen is None or len(keys) != len(known_keys) or any(map(operator.is_, keys, known_keys)):
        return None
    old, new = before.last, seen.last
    removed = 0 if before.length is None or seen.length is None else before.length - seen.length
    stop = old.shape[-2] - removed if old.dim() == 4 else -1
    # A layer with a window keeps only the last keys.
    start = stop - new.shape[-2]
    if start > 0 and new.shape[-2] + 1 != seen.window:
        return None
    if removed < 0 or start < 0 or new.dim() != 4 or old.shape[1::2] != new.shape[1::2]:
        return None
    length = known.length if seen.length is None else seen.length
    ids = known.ids if known.ids is None or seen.length is None else known.ids[:, : seen.length]
    begin_alike = start == 0 and len(new) == len(old) and not torch._C._are_functorch_transforms_active()
    if begin_alike and new.stride() == old.stride() and new.data_ptr() == old.data_ptr():
        # `crop` leaves the first tokens of each row in the same memory.
        return dataclasses.replace(known, length=length, ids=ids, keys=seen)
    few = old[:, 0, start:stop, :_COMPARED].to(new.device)
    same = (new[:, None, 0, :, :_COMPARED] == few).flatten(2).all(-1)
    rows = same.int().argmax(1, keepdim=True)
    if not bool(same.gather(1, rows).all()):
        return None
    if ids is not None and ids.shape[0] > 1:
        others, ids = ids, ids.index_select(0, rows.flatten().to(ids.device))
        # Rows with equal keys may have had different positions.
        if bool((same.to(ids.device).unsqueeze(-1) & (ids.unsqueeze(1) != others)).any()):
            return None
    mask = known.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask.index_select(0, rows.flatten().to(mask.device))
    return dataclasses.replace(known, length=length, ids=ids, keys=seen, mask=mask)


def _seen(cache: Any) -> SeenKeys | None:
    keys = _keys(cache)
    if not keys:
        return None
    layers = self_attention_cache(cache).layers
    last = next(layer for layer in reversed(layers) if getattr(layer, "keys", None) is keys[-1])
    length = last.get_seq_length()
    window = getattr(last, "sliding_window", 0) if getattr(last, "is_sliding", False) else 0
    return SeenKeys(keys, length if isinstance(length, int) else None, window, keys[-1], [False] * len(keys))


def _keys(cache: Any) -> list[Tensor]:
    of_layers = [getattr(layer, "keys", None) for layer in getattr(self_attention_cache(cache), "layers", ())]
    return [keys for keys in of_layers if isinstance(keys, Tensor)]


def _writes(tensor: Tensor | None) -> tuple[Any, ...]:
    """How often others have written to a tensor, and its shape. Tensors of inference mode do not count."""
    return () if tensor is None else (0 if tensor.is_inference() else tensor._version, tensor.shape)
