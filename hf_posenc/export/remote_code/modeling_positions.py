"""A model of transformers with another position encoding. It needs torch and transformers 5.17 or newer.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

The layers are those of the stock class. `position_parts` in config.json says which parts of this file act instead of
its positions:

- `vectors` are added to the token embeddings;
- `rotation` turns queries and keys;
- `bias` is added to the attention logits.

The classes at the end of the file load a checkpoint. Everything above them is the same for all models.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import initialization
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: The attention function of the layers, registered under a name that belongs to this file.
ATTENTION = f"positions of {__name__}"
#: A stock class, which would use other positions, takes this for the name of the weights and quotes it in its error.
GUARD = (
    f"this checkpoint has positions that transformers {transformers.__version__.split('.')[0]} does not have. Load it "
    "with an Auto class and trust_remote_code=True, which runs its file modeling_positions.py"
)


# Vectors: positions (batch or 1, length) -> (batch or 1, length, hidden)


class LearnedVectors(nn.Embedding):
    """A trained vector for each position, as in BERT and GPT-2. Row `offset` is that of position 0."""

    def __init__(self, width: int, rows: int, offset: int) -> None:
        super().__init__(rows, width)
        self.offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        rows = (positions + self.offset).clamp(min=0)
        if positions.is_cpu and not torch.compiler.is_compiling() and int(rows.max()) >= self.num_embeddings:
            raise ValueError(
                f"The table of positions ends after {self.num_embeddings - self.offset} tokens. Shorten the input."
            )
        return super().forward(rows)


class SinusoidalVectors(nn.Module):
    """Sines and cosines of the position (arXiv:1706.03762). `frequencies` are radians per position."""

    def __init__(
        self, width: int, frequencies: list[float], dtype: str, layout: str, scale: float, offset: int
    ) -> None:
        super().__init__()
        self.frequencies, self.dtype, self.layout = frequencies, getattr(torch, dtype), layout
        self.scale, self.offset = scale, offset

    def forward(self, positions: Tensor) -> Tensor:
        frequencies = torch.tensor(self.frequencies, dtype=self.dtype, device=positions.device)
        angles = (positions + self.offset).unsqueeze(-1).to(self.dtype) * frequencies
        sines, cosines = angles.sin().float(), angles.cos().float()
        if self.layout == "interleaved":
            return self.scale * torch.stack((sines, cosines), dim=-1).flatten(-2)
        return self.scale * torch.cat((sines, cosines) if self.layout == "concatenated" else (cosines, sines), dim=-1)


VECTORS = {"learned": LearnedVectors, "sinusoidal": SinusoidalVectors}


# Rotation


class Rotation(nn.Module):
    """Turns pairs of dimensions by `position * frequency` (arXiv:2104.09864), in the layout of Llama.

    It stands in for the rotary module of a decoder. Without frequencies nothing turns.
    """

    def __init__(self, width: int, frequencies: list[float], attention_scaling: float) -> None:
        super().__init__()
        self.frequencies = frequencies or [0.0] * (width // 2)
        self.attention_scaling = attention_scaling

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine, `(batch or 1, length, width)` in the dtype of `like`."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=position_ids.device)
        angles = position_ids.unsqueeze(-1).float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(like), (angles.sin() * self.attention_scaling).to(like)


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns `(batch, heads, length, width)`."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sine.unsqueeze(1)


# Biases: what a layer remembers of its tokens (batch or 1, features, keys, 1) -> (batch or 1, heads, queries, keys)


class DistanceBias(nn.Module):
    """A function of the distance: key position minus query position, negative in the past."""

    def features(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """The features that are kept of new tokens: their positions."""
        return positions[:, None, :, None]

    def forward(self, features: Tensor, query_length: int) -> Tensor:
        keys = features.squeeze(-1)
        return self.of_distance(keys.unsqueeze(-2) - keys[..., -query_length:].unsqueeze(-1)).float()

    def of_distance(self, distance: Tensor) -> Tensor:
        """`(batch or 1, 1, queries, keys)` -> `(batch or 1, heads, queries, keys)`."""
        raise NotImplementedError


class AlibiBias(DistanceBias):
    """`-slope * |distance|` (arXiv:2108.12409). With `num_left`, so many heads see the left side, the others the right.

    `learned` slopes are stored as logarithms.
    """

    def __init__(self, config: Any, slopes: list[float], num_left: int | None, learned: bool) -> None:
        super().__init__()
        self.slopes, self.num_left = slopes, num_left
        self.log_slopes = nn.Parameter(torch.empty(len(slopes))) if learned else None

    def reset_parameters(self) -> None:
        if self.log_slopes is not None:
            initialization.copy_(self.log_slopes, torch.tensor(self.slopes).log())

    def of_distance(self, distance: Tensor) -> Tensor:
        learned = self.log_slopes
        slopes = torch.tensor(self.slopes, device=distance.device) if learned is None else learned.float().exp()
        bias = -distance.abs() * slopes.to(distance.device).view(-1, 1, 1)
        if self.num_left is None:
            return bias
        left, right = bias[:, : self.num_left], bias[:, self.num_left :]
        return torch.cat((left.masked_fill(distance > 0, -1e4), right.masked_fill(distance < 0, -1e4)), dim=1)


class T5Bias(DistanceBias, nn.Embedding):
    """A trained number per head and bucket of distances (arXiv:1910.10683, section 2.1)."""

    def __init__(self, config: Any, num_buckets: int, max_distance: int, bidirectional: bool) -> None:
        nn.Embedding.__init__(self, num_buckets, config.num_attention_heads)
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def of_distance(self, distance: Tensor) -> Tensor:
        buckets = self.bucket(distance.squeeze(1)).to(self.weight.device)
        return nn.functional.embedding(buckets, self.weight).movedim(-1, 1).to(distance.device)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance: one for each small distance, then ever wider ones up to `max_distance`."""
        count = self.num_embeddings // 2 if self.bidirectional else self.num_embeddings
        steps = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        exact = count // 2
        growth = torch.log(steps.clamp(min=1).float() / exact) / math.log(self.max_distance / exact) * (count - exact)
        wide = (exact + growth.long()).clamp(max=count - 1)
        return (distance > 0).long() * count * self.bidirectional + torch.where(steps < exact, steps, wide)


class Projected(torch.autograd.Function):
    """Clamps numbers, and drops only the gradients that would move them further out of the range."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, clamped: Tensor) -> Tensor:
        ctx.save_for_backward(numbers, clamped)
        return clamped.view_as(clamped)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        numbers, clamped = ctx.saved_tensors
        outward = ((numbers < clamped) & (gradient > 0)) | ((numbers > clamped) & (gradient < 0))
        return gradient.masked_fill(outward, 0.0), None


class KerpleBias(DistanceBias):
    """`-r1 * log(1 + r2 * |distance|)` or `-r1 * |distance| ** r2`, both trained per head (arXiv:2205.09921)."""

    def __init__(self, config: Any, variant: str, exponent: float | None, minimum: float) -> None:
        super().__init__()
        self.variant, self.exponent, self.minimum = variant, exponent, minimum
        self.r1 = nn.Parameter(torch.empty(config.num_attention_heads))
        self.r2 = nn.Parameter(torch.empty(config.num_attention_heads)) if exponent is None else None

    def reset_parameters(self) -> None:
        first, second = (2.0, 1.0) if self.variant == "log" else (1.0, 2.0)
        initialization.uniform_(self.r1, 0.0, first)
        if self.r2 is not None:
            initialization.uniform_(self.r2, 0.0, second)

    def of_distance(self, distance: Tensor) -> Tensor:
        steps = distance.abs().float()
        r1 = self._within(self.r1, steps, math.inf)
        if self.r2 is None:
            assert self.exponent is not None
            return -r1 * steps**self.exponent
        r2 = self._within(self.r2, steps, math.inf if self.variant == "log" else 2.0)
        return -r1 * (torch.log1p(r2 * steps) if self.variant == "log" else steps**r2)

    def _within(self, numbers: Tensor, like: Tensor, largest: float) -> Tensor:
        numbers = numbers.to(like)
        projected: Tensor = Projected.apply(numbers, numbers.detach().clamp(self.minimum, largest))
        return projected.view(-1, 1, 1)


class ConstantGateBias(DistanceBias):
    """A forget gate with a trained constant per head: `-log(sigmoid(bias))` for each token in between."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.num_attention_heads))

    def reset_parameters(self) -> None:
        initialization.zeros_(self.bias)

    def of_distance(self, distance: Tensor) -> Tensor:
        slopes = nn.functional.softplus(-self.bias.float()).to(distance.device).view(-1, 1, 1)
        return distance.clamp(max=0) * slopes


class ForgetGateBias(nn.Module):
    """The sum of the logarithms of the forget gates from a key to the query (arXiv:2503.02130)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.initializer_range = config.initializer_range
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_attention_heads))

    def reset_parameters(self) -> None:
        initialization.normal_(self.weight, std=self.initializer_range)
        initialization.zeros_(self.bias)

    def features(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """The features that are kept of new tokens: minus the logarithms of their gates; 0 at padding."""
        weight, bias = (parameter.to(hidden_states.device, torch.float32) for parameter in (self.weight, self.bias))
        decays = nn.functional.softplus(-nn.functional.linear(hidden_states.float(), weight, bias))
        return decays.masked_fill((positions < 0).unsqueeze(-1), 0.0).transpose(1, 2).unsqueeze(-1)

    def forward(self, features: Tensor, query_length: int) -> Tensor:
        sums = features.squeeze(-1).cumsum(dim=-1)
        return sums.unsqueeze(-2) - sums[..., -query_length:].unsqueeze(-1)


BIASES = {
    "alibi": AlibiBias,
    "t5": T5Bias,
    "kerple": KerpleBias,
    "constant_gate": ConstantGateBias,
    "forget_gate": ForgetGateBias,
}


# The place of the parts in a stock model


class Positions(nn.Module):
    """The parts of a model, and the hooks that call them.

    The position of a token is its `position_ids`, or its number among the tokens that `attention_mask` does not hide.
    Vectors of an encoder take its number among all tokens of a row that begins with one that is not hidden.
    """

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        parts = config.position_parts
        self.num_layers = config.num_hidden_layers
        self.first_row = parts["first_row"]
        self.vectors = self._made(VECTORS, parts["vectors"], width)
        self.rotation = None if parts["rotation"] is None else Rotation(**parts["rotation"])
        biases = [] if parts["bias"] is None else [parts["bias"]] * (1 if parts["shared"] else self.num_layers)
        #: Whether `attend` has to turn queries and keys. A decoder does so by itself, with the module in `rotary_emb`.
        self.rotates_heads = False
        #: Whether vectors are those of the slots of a row, as in BERT: a mask hides tokens without moving the others.
        self.numbers_slots = False
        self.biases = nn.ModuleList(self._made(BIASES, options, config) for options in biases)

    @staticmethod
    def _made(kinds: Mapping[str, Callable[..., nn.Module]], options: dict[str, Any] | None, place: Any) -> Any:
        if options is None:
            return None
        return kinds[options["kind"]](place, **{name: value for name, value in options.items() if name != "kind"})

    def install(self, base: Any) -> None:
        """Puts the parts into a stock base model, in the places of its own positions."""
        base.positions = self
        if hasattr(base, "rotary_emb"):
            base.rotary_emb, layers = self.rotation, [layer.self_attn for layer in base.layers]
        else:
            base.embeddings.position_embeddings = NoVectors()
            layers = [layer.attention.self for layer in base.encoder.layer]
            self.rotates_heads, self.numbers_slots = self.rotation is not None, True
        names = tuple(inspect.signature(base.forward).parameters)
        base.register_forward_pre_hook(functools.partial(self.before_model, names), with_kwargs=True)
        for index, layer in enumerate(layers if self.biases or self.rotates_heads else []):
            layer.config = AttentionConfig(layer.config)
            layer.register_forward_pre_hook(functools.partial(self.before_attention, index), with_kwargs=True)

    def before_model(
        self, names: tuple[str, ...], base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Finds the positions of new tokens, -1 at padding, adds their vectors, and passes them to the layers."""
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        ids, embeddings, mask = (kwargs.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
        given = embeddings if ids is None else ids
        if given is None:
            return None  # The stock model says what is wrong.
        length, cache = given.shape[1], cache_of(kwargs)
        start = 0 if cache is None else cache.get_seq_length()
        stop = start + length
        counted, slots = None, torch.arange(start, stop, device=given.device).unsqueeze(0)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            counted = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, -1)[:, start:stop]
        if kwargs.get("position_ids") is not None:
            positions = kwargs["position_ids"] - self.first_row
            rows = positions = positions if counted is None else positions.masked_fill(counted < 0, -1)
        else:
            rows = positions = slots if counted is None else counted
            if self.numbers_slots and counted is not None:
                rows = torch.where(counted[:, :1] < 0, counted, slots)  # Padding on the left moves all tokens.
        kwargs["position_ids"] = positions.clamp(min=0) + self.first_row
        if "token_type_ids" in names and kwargs.get("token_type_ids") is None:
            # The stock model has as many zeros as rows in its table.
            kwargs["token_type_ids"] = torch.zeros(given.shape[:2], dtype=torch.long, device=given.device)
        if self.vectors is not None:
            embeddings = base.get_input_embeddings()(ids) if embeddings is None else embeddings
            vectors = self.vectors(rows.to(next(self.parameters(), rows).device))
            kwargs["input_ids"], kwargs["inputs_embeds"] = None, embeddings + vectors.to(embeddings)
        if self.biases or self.rotates_heads:
            kwargs["token_positions"] = positions
        return (), kwargs

    def before_attention(
        self, index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Passes the rotation of a call and the bias of its pairs of tokens to `attend`."""
        hidden_states = args[0] if args else kwargs["hidden_states"]
        if "token_positions" not in kwargs:
            raise NotImplementedError("The layers of this model do not pass the positions of tokens to their attention")
        positions = kwargs.pop("token_positions").to(hidden_states.device)
        phases = bias = None
        if self.rotates_heads:
            assert self.rotation is not None
            phases = self.rotation(hidden_states, positions.clamp(min=0))
        if self.biases:
            part: Any = self.biases[min(index, len(self.biases) - 1)]
            features = part.features(hidden_states, positions)
            if (cache := cache_of(kwargs)) is not None:
                features = self.remembered(cache, index, features.expand(len(hidden_states), -1, -1, -1))
            bias = functools.partial(part, features)
        return args, {**kwargs, "phases": phases, "bias": bias}

    def remembered(self, cache: Any, index: int, features: Tensor) -> Tensor:
        """Appends features of new tokens to a layer of the cache beyond those of the model; returns those of all."""
        kinds = {type(layer) for layer in getattr(cache, "layers", [cache])}
        if other := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
            raise ValueError(
                f"The bias of this model needs a growing cache, and {type(cache).__name__} consists of "
                f"{other.pop().__name__}. Use DynamicCache, the default of generate without cache_implementation."
            )
        place = self.num_layers + index
        while len(cache.layers) <= place:
            cache.layers.append(DynamicLayer())
        if cache.layers[place].get_seq_length() != cache.layers[index].get_seq_length():
            raise ValueError("The cache has keys of another model. Start with an empty one.")
        return cache.layers[place].update(features, features[..., :0])[0]


class NoVectors(nn.Module):
    """Stands in for the position table of an encoder."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class AttentionConfig:
    """Takes the place of the config of the model in an attention layer: it names `attend` as its attention function."""

    _attn_implementation = ATTENTION

    def __init__(self, config: Any) -> None:
        self.of_model = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "of_model":
            raise AttributeError(name)
        return getattr(self.of_model, name)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    phases: tuple[Tensor, Tensor] | None,
    bias: Callable[[int], Tensor] | None,
    **kwargs: Any,
) -> Any:
    """Calls the attention function of the model with rotated heads, and with the bias as a part of the mask."""
    name = module.config.of_model._attn_implementation
    if phases is not None:
        query, key = rotated(query, *phases), rotated(key, *phases)
    if bias is not None:
        if name not in ("eager", "sdpa"):
            raise ValueError(
                f"The attention implementation {name!r} accepts no bias. Load the model with "
                'attn_implementation="sdpa", or "eager".'
            )
        pairs = bias(query.shape[2])[..., -key.shape[2] :].to(query.device)
        if pairs.shape[1] != query.shape[1]:
            raise ValueError(f"The bias has {pairs.shape[1]} heads, but this layer has {query.shape[1]}.")
        is_causal = kwargs.get("is_causal")
        is_causal = module.is_causal if is_causal is None else is_causal
        attention_mask = with_bias(attention_mask, pairs, is_causal, query.dtype)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function(module, query, key, value, attention_mask, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


def with_bias(mask: Tensor | None, bias: Tensor, is_causal: bool, dtype: torch.dtype) -> Tensor:
    """A mask that adds the bias, `(batch or 1, heads, queries, keys)`. `mask` is boolean (True: seen) or is added."""
    smallest, (queries, keys) = max(torch.finfo(dtype).min, torch.finfo(bias.dtype).min), bias.shape[-2:]
    if mask is None and is_causal and queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=bias.device).tril(keys - queries)
    if mask is None:
        merged = bias
    elif mask.dtype == torch.bool:
        merged = bias.masked_fill(~mask, smallest)
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        merged = (mask.float() + bias).masked_fill(hidden, smallest)
    return merged.clamp(min=smallest).to(dtype)


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache of a call. Its argument has another name before transformers 5.24."""
    return kwargs.get("cache", kwargs.get("past_key_values"))


# The base classes of the classes of a checkpoint


class PositionedConfig:
    """The config of a stock class with `position_parts`."""

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("transformers_weights", None)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "transformers_weights": GUARD}


class PositionedModel:
    """A stock class with the parts of its config."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if hasattr(self.base_model, "positions"):
            return  # `AutoModel` has made it, for a head that is the same for many models.
        positions = Positions(config, self.get_input_embeddings().embedding_dim)
        for module in positions.modules():
            self._init_weights(module)
        positions.install(self.base_model)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AlibiBias | KerpleBias | ConstantGateBias | ForgetGateBias):
            module.reset_parameters()
