"""Schemes that are written as a function of the distance."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.schemes.parts import DistanceBias
from hf_posenc.schemes.scheme import BuildContext, SchemeConfig, register_scheme
from hf_posenc.schemes.validation import check_declared

#: Parameters of a function that are not options, because the place in the model determines them.
_OF_PLACE = ("head", "num_heads")


@dataclasses.dataclass(frozen=True)
class LearnedPerHead:
    """The default of an option that is a learned number of every head.

    Args:
        initial: the number that every head starts with, and the default of the option.
    """

    initial: float


def learned_per_head(initial: float) -> Any:
    """The default of a parameter of a `distance_bias` that is learned: one number per head, without weight decay.

    The function receives the numbers as a float32 tensor `(heads, 1, ...)`, with as many axes as the result. The option
    of this name is the number that every head starts with. The parameter has the name of the option in the state dict.

    Args:
        initial: the default of the option.
    """
    return LearnedPerHead(float(initial))


class FunctionOfDistance(DistanceBias):
    """The bias that a function computes from the distance and the options."""

    def __init__(self, config: FunctionConfig, context: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.num_heads = context.num_heads
        #: The module of the function, which may read numbers that change.
        self.written_in = type(config).__module__
        self.no_weight_decay = config.learned
        for name in sorted(config.learned):
            initial = getattr(config, name)
            self.register_parameter(name, self.learned(name, context.num_heads, nn.init.constant_, val=initial))

    def _get_name(self) -> str:
        return self.config.name

    def forward(self, distance: Tensor) -> Tensor:
        """Returns `(heads, *distance.shape)` in float32.

        Raises:
            TypeError: if the function does not return a tensor.
            ValueError: if it returns a tensor of another shape.
        """
        config, shape = self.config, (self.num_heads, *distance.shape)
        of_heads = (-1, *(1 for _ in distance.shape))
        given: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        given |= {name: numbers.float().view(of_heads) for name, numbers in self.named_parameters()}
        if "num_heads" in config.of_place:
            given["num_heads"] = self.num_heads
        if "head" in config.of_place:
            heads = torch.arange(1, self.num_heads + 1, dtype=torch.float32, device=distance.device)
            given["head"] = heads.view(of_heads)
        bias = type(config).function(distance.float(), **given)
        if not isinstance(bias, Tensor):
            raise TypeError(f"{config.name} returned {type(bias).__name__}; expected a tensor.")
        of_distances = bias.shape[max(0, bias.ndim - distance.ndim) :]
        if of_distances != distance.shape or bias.shape[: -distance.ndim] not in ((), (1,), (self.num_heads,)):
            raise ValueError(
                f"{config.name} returned the shape {tuple(bias.shape)} for distances of the shape "
                f"{tuple(distance.shape)}; expected {shape}, one value per head and distance, or "
                f"{tuple(distance.shape)}, the same for all heads."
            )
        return bias.float().expand(shape)


class FunctionConfig(SchemeConfig):
    """Base class of the configs that `distance_bias` makes from functions."""

    part_class = FunctionOfDistance
    #: Takes the distance and the options.
    function: ClassVar[Callable[..., Tensor]]
    #: The options that are learned.
    learned: ClassVar[frozenset[str]]
    #: The parameters of the function that the place in the model determines.
    of_place: ClassVar[frozenset[str]]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_declared(getattr(self, field.name), field, type(self).__name__)
        super().__post_init__()


def distance_bias(
    function: Callable[..., Tensor] | None = None, /, *, per_layer: bool = False, causal_only: str = ""
) -> Any:
    """Decorator that registers a function of the distance as a scheme, under its own name.

    ::

        @hf_posenc.distance_bias
        def root(distance, head, num_heads, scale: float = 1.0):
            \"\"\"Subtracts `scale * slope * sqrt(distance)` from the attention logits, with the slopes of ALiBi.\"\"\"
            return -scale * 2.0 ** (-8 * head / num_heads) * distance.abs().sqrt()

        patch_model(model, "root", scale=8.0)

    The function takes the distance, key position minus query position (negative: in the past), as a float32 tensor of
    any shape, and returns the bias that is added to the attention logits: a tensor `(heads, *distance.shape)`, or
    `distance.shape` if all heads are alike. It is called once per distance and not for every pair of tokens, so it must
    not depend on which distances are computed together. Two parameters are filled in by the model: `num_heads`, and
    `head`, a float32 tensor `(heads, 1, ...)` with the numbers 1, 2, ... of the heads. All others are the options of
    the scheme, with their types and defaults, and `learned_per_head` is the default of one that is trained.

    The name then stands for the config of the scheme, as `RopeConfig` does: `root(scale=8.0)` is a scheme. The config
    has the docstring of the function, whose section "Args" describes the options.

    Args:
        function: the function.
        per_layer: whether every layer learns its own numbers.
        causal_only: why the scheme is refused in a bidirectional model; empty if it is not.

    Raises:
        ValueError: for a parameter that cannot be an option, or a name that is taken or no lower-case identifier.
    """
    if function is None:
        return lambda decorated: distance_bias(decorated, per_layer=per_layer, causal_only=causal_only)
    return register_scheme(config_of_function(function, per_layer, causal_only))


def config_of_function(function: Callable[..., Tensor], per_layer: bool = False, causal_only: str = "") -> Any:
    """The config class of a function of the distance, as `distance_bias` registers it."""
    if not inspect.signature(function).parameters:
        raise ValueError(f"{function.__name__} has no parameters; the first of a `distance_bias` is the distance.")
    _, *parameters = inspect.signature(function).parameters.values()
    options = [parameter for parameter in parameters if parameter.name not in _OF_PLACE]
    learned = frozenset(parameter.name for parameter in options if isinstance(parameter.default, LearnedPerHead))
    taken = {*dir(FunctionConfig), *dir(FunctionOfDistance), *vars(nn.Module()), "config"}
    for parameter in options:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or parameter.name in taken:
            raise ValueError(
                f"The parameter {parameter.name!r} of {function.__name__} cannot be an option of a scheme: it collects "
                "several arguments, or has a name that configs or modules use. Give every option its own name."
            )
        if isinstance(parameter.default, list | dict | set):
            raise ValueError(
                f"The default of the option {parameter.name!r} of {function.__name__} is a "
                f"{type(parameter.default).__name__}, but options must not change. Use a tuple or a number."
            )
    config_class = dataclasses.make_dataclass(
        function.__name__,
        [_field(parameter) for parameter in options],
        bases=(FunctionConfig,),
        frozen=True,
        namespace={
            "name": function.__name__,
            "__doc__": function.__doc__,
            "per_layer": per_layer,
            "causal_only": causal_only,
            "function": staticmethod(function),
            "learned": learned,
            "of_place": frozenset(parameter.name for parameter in parameters) & frozenset(_OF_PLACE),
        },
    )
    config_class.__module__, config_class.__qualname__ = function.__module__, function.__qualname__
    return config_class


def _field(parameter: inspect.Parameter) -> Any:
    """The field of a config for a parameter; without a declared type, that of the default."""
    default, kind = parameter.default, parameter.annotation
    if isinstance(default, LearnedPerHead):
        default, kind = default.initial, float
    if kind is parameter.empty:
        kind = Any if default is parameter.empty else type(getattr(default, "default", default))
    return (parameter.name, kind) if default is parameter.empty else (parameter.name, kind, default)
