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


@dataclass(frozen=True)
class Decoded:
    """Tokens that were decoded one by one behind a static cache, until it was full.

    Args:
        graphs: how many there are.
        spoilers: operators that CUDA graphs cannot hold, and "moved" or "written" with the shape of an input that is
            neither the token nor in the cache: one at another address in each call, or one that the graph writes to.
        outputs: number of tensors that the graph returns. CUDA graphs overwrite them in the next call.
        found: the logits.
        wanted: those of one forward pass.
    """

    graphs: int
    spoilers: list[str]
    outputs: int
    found: Tensor
    wanted: Tensor


def decoded(scheme: Any, architecture: str = "llama_gqa") -> Decoded:
    """Decodes four tokens behind a static cache, in a model of two layers, which share values."""
    model, ids = model_of(architecture, scheme, num_hidden_layers=2), tokens(batch=1, length=12)
    cache = StaticCache(config=model.config, max_cache_len=12)
    spoilers: set[str] = set()
    graphs: list[int] = []

    def read(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = list(graph.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        spoilers.update(str(node.target) for node in nodes if any(word in str(node.target) for word in SPOILERS))
        spoilers.update(f"constant {name}" for name, _ in graph.named_buffers())
        targets = {node.args[0] for node in nodes if node.op == "call_function" and "_." in str(node.target)}
        written = [number for number, node in enumerate(inputs) if node in targets]
        graphs.append(len(nodes[-1].args[0]))
        before: list[int] = []

        def run(given: list[Any]) -> Any:
            kept = {one.data_ptr() for layer in cache.layers for one in vars(layer).values() if isinstance(one, Tensor)}
            places = [one.data_ptr() if isinstance(one, Tensor) else one for one in given]
            moved = [number for number, place in enumerate(before) if place != places[number]]
            for word, numbers in (("moved", moved), ("written", written)):
                others = [given[number] for number in numbers if places[number] not in kept]
                spoilers.update(f"{word} {tuple(one.shape)}" for one in others if one.shape != (1, 1))
            before[:] = places
            return graph.forward(*given)

        return make_boxed_func(lambda *given: run(list(given)))

    backend = aot_autograd(fw_compiler=read, keep_inference_input_mutations=True)
    wanted = kit.decoded(model, ids, None, [12])[:, 8:]
    kit.decoded(model, ids, cache, [8])
    found = kit.decoded(torch.compile(model, backend=backend, fullgraph=True), ids, cache, [1] * 4, start=8)
    return Decoded(len(graphs), sorted(spoilers), max(graphs), found, wanted)


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
        steps_of_cache = decoded(config) if scheme in (None, *DECODED) else None
        count = "refuses a cache" if steps_of_cache is None else str(steps_of_cache.graphs)
        found = {*steps.spoilers, *(() if steps_of_cache is None else steps_of_cache.spoilers)}
        spoilers = ", ".join(sorted(found)) or "none"
        lines.append(f"| {scheme or 'stock'} | {steps.graphs} | {steps.again} | {spoilers} | {count} |")
    return lines


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("\n".join(table()))
