"""The names that the plug-ins use exist in the installed engines. Their source is read, because importing them needs a
GPU and many packages: `pip install --no-deps sglang` is enough.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

#: Module: names that it defines; for a class, methods and their parameters.
VLLM = {
    "plugins/__init__": {"DEFAULT_PLUGINS_GROUP": "vllm.general_plugins"},
    "transformers_utils/config": {"get_config": None},
    "config/__init__": {"CUDAGraphMode": None, "VllmConfig": None},
    "model_executor/models/transformers/__init__": {"TransformersForCausalLM": {}},
    "model_executor/models/transformers/base": {
        "VLLM_ATTN_ATTR": "attn",
        "Base": {
            "__init__": {"vllm_config", "prefix"},
            "_decorate_for_torch_compile": set(),
            "recursive_replace": set(),
            "_create_attention_instances": {"prefix"},
            "_get_attn_cls": set(),
            "load_weights": {"weights"},
        },
    },
    "model_executor/layers/attention/attention": {"Attention": {"__init__": {"num_heads", "alibi_slopes", "prefix"}}},
}
SGLANG = {
    "srt/plugins/__init__": {"GENERAL_PLUGINS_GROUP": "sglang.srt.plugins"},
    "srt/utils/hf_transformers/config": {"get_config": None},
    "srt/models/registry": {"ModelRegistry": None, "_ModelRegistry": {"resolve_model_cls": {"architectures"}}},
    "srt/runtime_context": {"get_parallel": None},
    "srt/model_executor/cuda_graph_config": {"cuda_graph_fully_disabled": None},
    "srt/models/transformers": {
        "TransformersForCausalLM": {},
        "TransformersBase": {
            "__init__": {"config", "quant_config", "prefix"},
            "recursive_replace": set(),
            "load_weights": {"weights"},
        },
    },
}


def tree_of(engine: str, module: str) -> ast.Module:
    spec = importlib.util.find_spec(engine)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{engine} is not installed: pip install --no-deps {engine}")
    return ast.parse(Path(next(iter(spec.submodule_search_locations)), f"{module}.py").read_text())


def definitions(tree: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    return found


def parameters(node: ast.AST) -> set[str]:
    assert isinstance(node, ast.FunctionDef)
    return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}


@pytest.mark.parametrize(
    ("engine", "module"), [("vllm", module) for module in VLLM] + [("sglang", module) for module in SGLANG]
)
def test_names_and_parameters_exist(engine: str, module: str) -> None:
    found = definitions(tree_of(engine, module))
    for name, expected in {"vllm": VLLM, "sglang": SGLANG}[engine][module].items():
        assert name in found
        if isinstance(expected, str):
            assert ast.literal_eval(found[name]) == expected
        for method, needed in (expected if isinstance(expected, dict) else {}).items():
            assert needed <= parameters(definitions(found[name])[method])


def test_attention_of_sglang_takes_no_slopes() -> None:
    attention = definitions(tree_of("sglang", "srt/layers/radix_attention"))["RadixAttention"]
    assert not any("alibi" in name for name in parameters(definitions(attention)["__init__"]))


def test_every_backend_of_vllm_that_is_allowed_passes_slopes_to_its_kernel() -> None:
    tree = tree_of("vllm", "v1/attention/backends/flashinfer")
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "alibi_slopes"]
    assert all(isinstance(node.ctx, ast.Store) for node in uses), "FLASHINFER now reads the slopes: it may be allowed."
    for module in ("cpu_attn", "flash_attn", "triton_attn", "rocm_attn", "rocm_aiter_fa"):
        tree = tree_of("vllm", f"v1/attention/backends/{module}")
        uses = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "alibi_slopes"]
        assert any(isinstance(node.ctx, ast.Load) for node in uses), module
