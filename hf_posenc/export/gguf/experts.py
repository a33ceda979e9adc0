"""Mixtures of experts in llama.cpp: feed-forwards from which a router chooses some for each token."""

from __future__ import annotations

from torch import Tensor

from hf_posenc.errors import UnsupportedError
from hf_posenc.export.gguf.file import Metadata
from hf_posenc.export.layers import ModelParts

#: Weights of a layer with experts.
EXPERTS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_SHARED_GATE, _SHARED = "ffn_gate_inp_shexp.weight", "ffn_up_shexp.weight"


def refuse_dense_layers(parts: ModelParts, architecture: str) -> None:
    """Refuses a model whose config has some layers without experts.

    Raises:
        UnsupportedError: with the fields.
    """
    usual = {"mlp_only_layers": [], "decoder_sparse_step": 1}
    settings = {name: getattr(parts.stack.config, name, value) for name, value in usual.items()}
    if settings != usual:
        raise UnsupportedError(
            f"some layers of {parts.name} have no experts ("
            + ", ".join(f"{name}={value}" for name, value in settings.items())
            + f"); in llama.cpp's {architecture!r} all layers have them"
        )


def expert_entries(parts: ModelParts, architecture: str, tensors: dict[str, Tensor], *, sum_to_one: bool) -> Metadata:
    """The hyperparameters of experts; empty for a model without experts.

    Args:
        parts: the model.
        architecture: its architecture in llama.cpp.
        tensors: its weights. The gate of a shared expert becomes the vector that llama.cpp reads.
        sum_to_one: whether the architecture divides the weights of the experts of a token by their sum.

    Raises:
        UnsupportedError: for experts whose weights are used in another way.
    """
    router, up = (tensors.get(f"blk.0.{kind}.weight") for kind in (EXPERTS[0], "ffn_up_exps"))
    if router is None or up is None:
        return {}
    config = parts.stack.config
    if bool(getattr(config, "norm_topk_prob", True)) != sum_to_one:
        does = "divides" if sum_to_one else "does not divide"
        raise UnsupportedError(
            f"llama.cpp's {architecture!r} {does} the weights of the chosen experts by their sum, and {parts.name} "
            f"has norm_topk_prob={not sum_to_one}"
        )
    for name in [name for name in tensors if name.endswith(_SHARED_GATE)]:
        tensors[name] = tensors[name].flatten()
    entries: Metadata = {
        "feed_forward_length": int(config.intermediate_size),
        "expert_count": router.shape[0],
        "expert_used_count": int(config.num_experts_per_tok),
        "expert_feed_forward_length": up.shape[1],
    }
    if (shared := tensors.get(f"blk.0.{_SHARED}")) is not None:
        entries["expert_shared_feed_forward_length"] = shared.shape[0]
    return entries
