"""What torch.compile makes of models: how many graphs, and whether something in them spoils CUDA graphs.

    python -m tests.attention.graphs

prints a table of all schemes. A break would be an error: all graphs are whole.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

from hf_posenc import PositionEncodingError
from tests.kits import decoding as kit
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import gradients, patched, tokens
from tests.matrix.test_behaviour import SCHEMES

#: The second one compiles for any length, and the third one shows it.
LENGTHS = (32, 48, 64)
#: All that serve a cache.
DECODED = [name for name in SCHEMES if name != "normalized_integer"]
#: Operators that read the device on the host, or copy numbers of the host: CUDA graphs cannot hold them.
SPOILERS = ("_local_scalar_dense", "lift_fresh", "nonzero", "unique", "masked_select")


@dataclass(frozen=True)
class Trained:
    """Training steps, two of the first length and one of each other.

    Args:
        graphs: how many there are.
        again: how many the second step of a length adds.
        spoilers: operators that CUDA graphs cannot hold.
        found: the gradients of each step.
        wanted: those without a compiler.
    """

    graphs: int
    again: int
    spoilers: list[str]
    found: list[dict[str, Tensor]]
    wanted: list[dict[str, Tensor]]


def model_of(architecture: str, scheme: Any, num_hidden_layers: int = 1) -> Any:
    """A graph grows with the layers, so there is one, unless layers share something."""
    overrides: dict[str, Any] = {"max_position_embeddings": 128, "num_hidden_layers": num_hidden_layers}
    if ARCHITECTURES[architecture].sdpa:
        overrides["attn_implementation"] = "sdpa"
    return patched(architecture, scheme, **overrides)


def trained(scheme: Any) -> Trained:
    """Compiles a training step of a Llama."""
    model, operators = model_of("llama_gqa", scheme), set()

    def read(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.update(str(node.target) for node in graph.graph.nodes)
        assert not list(graph.buffers()), "a constant of the host"
        return make_boxed_func(graph.forward)

    counter = CompileCounterWithBackend(aot_autograd(fw_compiler=read))
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    def step(call: Any, length: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return gradients(model, call(tokens(length=length), labels=tokens(length=length), use_cache=False).loss)

    found, counts = [], []
    for length in (LENGTHS[0], *LENGTHS):
        found.append(step(compiled, length))
        counts.append(counter.frame_count)
    assert operators
    return Trained(
        graphs=counts[-1],
        again=counts[1] - counts[0],
        spoilers=[one for one in operators if any(word in one for word in SPOILERS)],
        found=found[1:],
        wanted=[step(model, length) for length in LENGTHS],
    )


def decoded(scheme: Any, architecture: str = "llama_gqa") -> tuple[int, Tensor, Tensor]:
    """Four tokens behind a static cache: the number of graphs, the logits, and those of one forward pass."""
    model, ids = model_of(architecture, scheme), tokens(batch=1, length=12)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    wanted = kit.decoded(model, ids, None, [12])[:, 8:]
    cache = StaticCache(config=model.config, max_cache_len=16)
    kit.decoded(model, ids, cache, [8])
    found = kit.decoded(compiled, ids, cache, [1] * 4, start=8)
    return counter.frame_count, found, wanted


def table() -> list[str]:
    """Lines of Markdown: for each scheme the graphs of a Llama."""
    lines = [
        "| scheme | graphs of training at three lengths | more in the second step of a length "
        "| operators that spoil CUDA graphs | graphs of four tokens in a static cache |",
        "|---" * 5 + "|",
    ]
    for scheme in (None, *SCHEMES):
        torch._dynamo.reset()
        config = None if scheme is None else SCHEMES[scheme]
        try:
            steps = trained(config)
        except PositionEncodingError:
            continue
        torch._dynamo.reset()
        count = "refuses a cache" if scheme not in (None, *DECODED) else str(decoded(config)[0])
        spoilers = ", ".join(sorted(steps.spoilers)) or "none"
        lines.append(f"| {scheme or 'stock'} | {steps.graphs} | {steps.again} | {spoilers} | {count} |")
    return lines


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("\n".join(table()))
