"""A small engine with pages, with the interfaces that the plug-ins use: one for vLLM's backend, one for SGLang's.

Like the real backends it builds a model of transformers without weights, replaces layers, and runs packed requests
whose keys it stores in pages. `test_real_interfaces.py` compares the names with the installed engines.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: The requests of the batch in progress: id, first row and number of rows of each.
BATCH: list[tuple[int, int, int]] = []


class Pages(nn.Module):
    """The attention of one layer over the keys of each request, `softmax(scale * q . k + slope * distance)`."""

    #: What vLLM's layers say about their kernel.
    backend_name = "CPU_ATTN"
    #: Whether the kernel adds slopes; a negative test switches it off.
    adds_slopes = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = num_heads, num_kv_heads, head_size, scale
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.impl = types.SimpleNamespace(alibi_slopes=slopes)
        self.attn_backend = types.SimpleNamespace(get_name=lambda: self.backend_name)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        for request, start, count in BATCH:
            rows = slice(start, start + count)
            for pages, new in ((self.keys, key), (self.values, value)):
                heads = new[rows].view(count, self.num_kv_heads, self.head_size)
                pages[request] = torch.cat((pages[request], heads)) if request in pages else heads
            keys, values = (
                pages[request].repeat_interleave(self.num_heads // self.num_kv_heads, 1)
                for pages in (self.keys, self.values)
            )
            own = query[rows].view(count, self.num_heads, self.head_size)
            logits = torch.einsum("ihd,jhd->hij", own, keys) * self.scale
            distance = torch.arange(len(keys)) - torch.arange(len(keys) - count, len(keys)).unsqueeze(1)
            if self.impl.alibi_slopes is not None and self.adds_slopes:
                logits = logits + self.impl.alibi_slopes.view(-1, 1, 1) * distance
            weights = logits.masked_fill(distance > 0, float("-inf")).softmax(-1)
            output[rows] = torch.einsum("hij,jhd->ihd", weights, values).reshape(count, -1)
        return output


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    pages = kwargs["attention_instances"][module.layer_idx] if "attention_instances" in kwargs else module.attn
    rows = [x.transpose(1, 2).reshape(x.shape[2], -1) for x in (query, key, value)]
    return pages(*rows), None


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """As in both engines: parameters without memory, buffers with their values."""
    stock = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        stock(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = stock  # type: ignore[method-assign]


class _Backend(nn.Module):
    """What both backends have in common."""

    implementation: str

    def build(self, config: Any) -> None:
        self.config = config
        config._attn_implementation = self.implementation
        ALL_ATTENTION_FUNCTIONS.register(self.implementation, _attend)
        with _parameters_on_meta():
            self.model: Any = AutoModel.from_config(config, dtype=torch.float32)

    def geometry(self) -> dict[str, Any]:
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return {
            "num_heads": config.num_attention_heads,
            "head_size": head_dim,
            "scale": head_dim**-0.5,
            "num_kv_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
        }

    def load_weights(self, weights: Any) -> set[str]:
        """Refuses unknown names, as vLLM does; a projection is loaded into the place of its fused layer."""
        own, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            *path, projection, attribute = name.split(".")
            place = name if name in own else ".".join([*path, _FUSED.get(projection, projection), attribute])
            if place not in own:
                raise ValueError(f"There is no module or parameter named {name!r}")
            module = self.get_submodule(place.rpartition(".")[0])
            setattr(module, attribute, nn.Parameter(tensor.clone(), requires_grad=False))
            loaded.add(name)
        return loaded

    @torch.no_grad()
    def run(self, requests: dict[int, Tensor], starts: dict[int, int], **kwargs: Any) -> dict[int, Tensor]:
        """Runs the new tokens of several requests in one row; returns the logits of each, `(length, vocabulary)`."""
        BATCH.clear()
        first = 0
        for request, ids in requests.items():
            BATCH.append((request, first, len(ids)))
            first += len(ids)
        positions = torch.cat([torch.arange(len(ids)) + starts[request] for request, ids in requests.items()])
        hidden = self.model(
            input_ids=torch.cat([*requests.values()])[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=False,
            **kwargs,
        )[0][0]
        logits = hidden @ self.model.get_input_embeddings().weight.T
        return {request: logits[start : start + count] for request, start, count in BATCH}


_FUSED = {"q_proj": "qkv_proj.0", "k_proj": "qkv_proj.1", "v_proj": "qkv_proj.2"}


class _Fused(nn.ModuleList):
    """Three projections as one layer."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return tuple(projection(hidden_states) for projection in self)


class VllmBackend(_Backend):
    """`vllm.model_executor.models.transformers.TransformersForCausalLM`."""

    implementation = "vllm"

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.build(vllm_config.model_config.hf_config)
        self._decorate_for_torch_compile()
        self.recursive_replace()
        self._create_attention_instances(prefix)

    def _decorate_for_torch_compile(self) -> None:
        raise AssertionError("A patched model must not be compiled by its class.")

    def recursive_replace(self) -> None:
        for module in list(self.model.modules()):
            if hasattr(module, "q_proj"):
                forward = inspect.unwrap(type(module).forward)  # vLLM leaves the decorators out.
                source = textwrap.dedent(inspect.getsource(forward))
                source = source[source.index("def forward") :]
                for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
                    source = source.replace(f"self.{name}(hidden_states)", f"self.qkv_proj(hidden_states)[{index}]")
                namespace: dict[str, Any] = {}
                exec(
                    compile("from __future__ import annotations\n" + source, "fused", "exec"),
                    forward.__globals__,
                    namespace,
                )
                module.qkv_proj = _Fused([module.q_proj, module.k_proj, module.v_proj])
                del module.q_proj, module.k_proj, module.v_proj
                module.forward = types.MethodType(namespace["forward"], module)

    def _create_attention_instances(self, prefix: str = "") -> None:
        attention_class = self._get_attn_cls()
        for name, module in list(self.named_modules()):
            if hasattr(module, "qkv_proj"):
                path = ".".join(filter(None, (prefix, name, "attn")))
                module.attn = attention_class(prefix=path, **self.geometry())

    def _get_attn_cls(self) -> Any:
        return Pages


class SglangBackend(_Backend):
    """`sglang.srt.models.transformers.TransformersForCausalLM`."""

    implementation = "sglang"

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.build(config)
        self.recursive_replace()
        self.attention_instances = self._create_attention_instances()

    def recursive_replace(self) -> None:
        for module in self.model.modules():
            if type(module) is nn.Linear:
                module.__class__ = type("ColumnParallelLinear", (nn.Linear,), {})

    def _create_attention_instances(self) -> dict[int, Pages]:
        return {layer: Pages(**self.geometry()) for layer in range(self.config.num_hidden_layers)}

    def run(self, requests: dict[int, Tensor], starts: dict[int, int], **kwargs: Any) -> dict[int, Tensor]:
        return super().run(requests, starts, attention_instances=self.attention_instances, forward_batch=None)


class Registry:
    """`vllm.ModelRegistry` and `sglang.srt.models.registry.ModelRegistry`."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}

    def register_model(self, model_arch: str, model_cls: str) -> None:
        self.models[model_arch] = model_cls


class CUDAGraphMode(Enum):
    """`vllm.config.CUDAGraphMode`."""

    NONE = 0
    FULL_AND_PIECEWISE = 1


def modules() -> dict[str, types.ModuleType]:
    """The modules of both engines that the plug-ins import."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"ModelRegistry": Registry()},
        "vllm.config": {"CUDAGraphMode": CUDAGraphMode, "VllmConfig": object},
        "vllm.model_executor.layers.attention": {"Attention": Pages},
        "vllm.model_executor.models.transformers": {"TransformersForCausalLM": VllmBackend},
        "vllm.model_executor.models.transformers.base": {"VLLM_ATTN_ATTR": "attn"},
        "sglang.srt.model_executor.cuda_graph_config": {"cuda_graph_fully_disabled": lambda: True},
        "sglang.srt.models.transformers": {"TransformersForCausalLM": SglangBackend},
        "sglang.srt.models.registry": {"ModelRegistry": Registry()},
        "sglang.srt.runtime_context": {"get_parallel": lambda: types.SimpleNamespace(tp_size=1, pp_size=1)},
    }
    names = {".".join(name.split(".")[:end]) for name in contents for end in range(1, name.count(".") + 2)}
    found = {name: types.ModuleType(name) for name in sorted(names)}
    for name, module in found.items():
        module.__path__ = []  # type: ignore[attr-defined]
        module.__spec__ = types.SimpleNamespace(_initializing=False)  # type: ignore[assignment]
        vars(module).update(contents.get(name, {}))
    return found


def weights_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint, as the engines read them."""
    yield from load_file(folder / "model.safetensors").items()


def vllm_config(config: Any, processes: int = 1) -> Any:
    """The part of vLLM's config that a model reads."""
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_config=config),
        parallel_config=types.SimpleNamespace(world_size=processes),
        compilation_config=types.SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
    )


def use(monkeypatch: Any) -> None:
    """Puts the modules in place of the engines for one test, after which those of the plug-ins are imported anew."""
    for name in ("hf_posenc.serving.vllm_model", "hf_posenc.serving.sglang_model"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
