"""The parts of a scheme in the cross-attention layers of a decoder."""

from __future__ import annotations

from collections.abc import Callable

from hf_posenc.errors import UnsupportedError
from hf_posenc.patching.anatomy.anatomy import Anatomy, Stack
from hf_posenc.patching.anatomy.discovery import build_context, cross_attentions, with_layout
from hf_posenc.patching.anatomy.sites import AttentionLayer
from hf_posenc.patching.forwards import forward_parameters
from hf_posenc.schemes.config import BuildContext, SchemeConfig
from hf_posenc.schemes.needs import needs_of
from hf_posenc.schemes.parts import DistanceBias, SchemeParts
from hf_posenc.schemes.position_maps.randomized import RandomizedMap
from hf_posenc.schemes.refusals import CROSS_ATTENTION

#: The argument with the states that the cross-attention of a decoder reads.
_STATES = "encoder_hidden_states"


def cross_parts(
    config: SchemeConfig, stack: Stack, build: Callable[[SchemeConfig, BuildContext, str], SchemeParts]
) -> list[tuple[AttentionLayer, SchemeParts]]:
    """Each cross-attention layer of a stack, with the parts of a scheme; empty if there are none.

    Args:
        config: the scheme.
        stack: the stack.
        build: returns the parts for a layer: config, context and path of its module.

    Raises:
        UnsupportedError: for a scheme or a model that is not supported.
    """
    result = []
    for attention in cross_attentions(stack):
        name = f"{attention.path} ({type(attention.module).__name__})"
        tokens = stack.layout.takes_tokens and not stack.layout.has_axes
        if not attention.uses_interface or not tokens or _STATES not in forward_parameters(type(stack.module)):
            raise UnsupportedError(
                f"{name} cannot have a scheme: only the cross-attention of decoders of tokens that take {_STATES} and "
                "call transformers' attention interface is supported. Leave out cross_attention."
            )
        layer_config = with_layout(config, stack, attention)
        try:
            parts = build(layer_config, build_context(stack, attention), attention.path)
        except UnsupportedError as error:
            raise UnsupportedError(f"In cross-attention, every query sees every key. {error}") from error
        label = f"the scheme {layer_config.label!r} in {name}"
        CROSS_ATTENTION.refuse(needs_of(parts), label)
        if any(isinstance(module, RandomizedMap) for part in parts for module in part.modules()):
            raise UnsupportedError(
                CROSS_ATTENTION.message("it draws random positions, and would draw others for each sequence", label)
            )
        summands = () if parts.logit_bias is None else parts.logit_bias.summands()
        other = next((summand for summand in summands if not isinstance(summand, DistanceBias)), None)
        if other is not None:
            why = f"it adds a bias to the logits ({type(other).__name__}) that is more than a function of the distance"
            raise UnsupportedError(CROSS_ATTENTION.message(why, label))
        result.append((attention, parts))
    return result


def refuse_without_encoder(anatomy: Anatomy, part: str | None) -> None:
    """Refuses a scheme of cross-attention for a part that has none, or that reads patches of images.

    Only `patch_model` asks: a class without a decoder loads the other parts of a checkpoint.

    Raises:
        UnsupportedError: with the reason.
    """
    name = type(anatomy.model).__name__
    if not any(map(cross_attentions, anatomy.stacks([anatomy.part(part)]))):
        raise UnsupportedError(f"{name} has no cross-attention in this part. Leave out cross_attention.")
    if "vision" in anatomy.parts:
        raise UnsupportedError(
            f"The cross-attention of {name} reads patches of images, which have rows and columns and no distance to "
            "tokens. Leave out cross_attention."
        )
