"""One of two processes that share the heads of a model: how far each scheme is from one process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

from hf_posenc import AlibiConfig, ComposedConfig, CopeConfig, ForgetGateConfig, UnsupportedError, patch_model
from hf_posenc.recipes import swap_scheme
from tests.distributed.processes import full, largest, resaved
from tests.matrix.running import distance, patched, placed, strengthen, tokens
from tests.models import tiny
from tests.schemes.table import VARIANTS

YARN = {"scheme": "rope", "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 16}}
#: One scheme for each way in which heads are cut.
CUT: dict[str, Any] = {
    "native": "native",
    "rope": YARN,
    "learned": {"scheme": "learned", "num_positions": 64},
    "t5": "t5",
    "forget_gate": "forget_gate",
    "selective_rope": "selective_rope",
    "ssmax": "ssmax",
    "pope": "pope",
    "rope_pp": "rope_pp",
    "transformer_xl": "transformer_xl",
    "composed": ComposedConfig((AlibiConfig(), CopeConfig(initial_std=0.5), ForgetGateConfig())),
}
#: Those that are saved, loaded by two processes, and saved by them.
SAVED = ("native", "rope", "forget_gate", "pope", "composed")
#: Numbers of query heads and of key heads: one key head per process, and one head per process.
HEADS = {"grouped": (4, 2), "single": (2, 2), "one_head": (1, 1), "one_key": (4, 1)}
_KEYS_WHOLE = {f"model.layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "kv"}
#: The plan of a Llama, which early versions of transformers leave out if another is given.
_OF_LLAMA = {f"model.{name}": way for name, way in (LlamaConfig.base_model_tp_plan or {}).items()}
#: Plans by name: numbers of heads, and the rules.
PLANS: dict[str, tuple[str, Any]] = {
    "one head for two": ("one_head", "auto"),
    "one key head for two": ("one_key", "auto"),
    "one key head in both": ("one_key", _OF_LLAMA | _KEYS_WHOLE),
    "two key heads in both": ("grouped", _OF_LLAMA | _KEYS_WHOLE),
    "sequences": ("grouped", _OF_LLAMA | {"model.layers.*.input_layernorm": "sequence_parallel"}),
}
#: One scheme for each place from which a decoding step reads what earlier ones left.
GENERATED = COMPILED = ("alibi", "t5", "forget_gate", "pope")
#: Ways to generate that keep, reorder and fix a cache.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "beams": {"num_beams": 3}, "static cache": {"cache_implementation": "static"},
}  # fmt: skip
#: The part of them that is run by default. A graph takes both processes a minute.
QUICK_SCHEME, QUICK_WAYS = "forget_gate", ("greedy", "beams")
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
#: Plans with a projection that is gathered, with norms of heads, with experts.
BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", _EXPERTS),
}
#: Schemes that are placed under each plan, and in each architecture; `None` is the stock model.
PLANNED = (None, "alibi", "learned_rope", "grape", "pope")
ARRANGED = (None, "alibi", "forget_gate", "pope")
#: Those of them that are run by default.
QUICK_PLANNED, QUICK_ARRANGED = ("alibi", "pope"), ("forget_gate", "pope")
TENSORS, EXPERTS = {"tp_size": 2, "tp_plan": "auto"}, {"ep_size": 2}
#: Whether processes can share experts, which versions of transformers before 5.20 cannot say.
SHARES_EXPERTS = hasattr(DistributedConfig, "ep_size")
#: Architectures, and how two processes share them.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, TENSORS) for name in (*BUILDS, "gemma3_two_rotaries", "gpt_neox_partial", "deepseek_v3_mla")},
    **({
        "heads and experts": ("mixtral", TENSORS | EXPERTS), "experts": ("mixtral", {"fsdp_size": 2} | EXPERTS)
    } if SHARES_EXPERTS else {}),
}  # fmt: skip


def loaded(folder: Path, plan: Any = "auto") -> Any:
    """The model of a folder, split between the two processes."""
    config = DistributedConfig(tp_plan=plan, tp_size=2)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, attn_implementation="sdpa").eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of the whole sequences."""
    return model(tokens(2, 11)).logits


@torch.no_grad()
def decoded(model: Any) -> Tensor:
    """The same, the last tokens one by one, if the scheme can extend a cache."""
    ids = tokens(2, 11)
    out = model(ids[:, :8], use_cache=True)
    found = [out.logits]
    for step in range(8, 11):
        out = model(ids[:, step : step + 1], past_key_values=out.past_key_values)
        found.append(out.logits)
    return torch.cat(found, 1)


def gradients(model: Any) -> dict[str, Tensor]:
    """Of every parameter, after two backward passes: the second one is added to the first."""
    model.zero_grad()
    for _ in range(2):
        model(tokens(2, 11), labels=tokens(2, 11)).loss.backward()
    return {name: full(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}


def refusal(run: Any) -> str:
    """The words of a refusal, empty where there is none."""
    try:
        run()
    except UnsupportedError as error:
        return str(error)
    return ""


def fits(whole: Any, scheme: Any) -> bool:
    """Whether a model of one process takes a scheme, which may be made for wider heads or for encoders."""
    try:
        patch_model(copy.deepcopy(whole), scheme)
    except (ValueError, UnsupportedError):
        return False
    return True


def placed_beside(split: Any, whole: Any, scheme: Any) -> dict[str, Any]:
    """A scheme placed in a model that is already split, and in one that is not."""
    # Every process draws other parameters; the first one's count.
    torch.manual_seed(7 + dist.get_rank())
    words = refusal(lambda: patch_model(split, scheme))
    if words:
        return {"refused": words}
    torch.manual_seed(7)
    patch_model(whole, scheme)
    names = {name for name, _ in whole.named_parameters() if "position_encoding" in name}
    same = all(
        torch.equal(weight, dict(split.named_parameters())[name])
        for name, weight in whole.named_parameters()
        if name in names
    )
    for model in (split, whole):
        strengthen(model)
    result: dict[str, Any] = {"same": same, "forward": distance(logits(split), logits(whole))}
    words = refusal(lambda: decoded(whole))
    if words:
        assert refusal(lambda: decoded(split)) == words
    else:
        result["decoded"] = distance(decoded(split), decoded(whole))
    for model in (split, whole):
        model.train()
    torch.manual_seed(11)
    expected = gradients(whole)
    torch.manual_seed(11)
    result["gradients"], result["where"] = largest(gradients(split), expected)
    result["trained"] = sum(name in expected for name in names)
    for model in (split, whole):
        model.eval()
    return result


def stock(name: str) -> Any:
    """A stock model of one build."""
    if name not in BUILDS:
        return patched(name, None)
    model_class, settings = BUILDS[name]
    torch.manual_seed(0)
    model = tiny(model_class, pad_token_id=0, **settings)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    return model.eval()


def generated(folder: Path, scheme: Any, ways: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Whether two processes generate the tokens of one, with padding."""
    models = [loaded(folder), AutoModelForCausalLM.from_pretrained(folder).eval()]
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    for model in models:
        placed(model, scheme)
    result: dict[str, bool] = {}
    for way, settings in ways.items():
        split, whole = (
            model.generate(tokens(2, 11), attention_mask=mask, max_new_tokens=5, pad_token_id=0, **settings)
            for model in models
        )
        result[way] = torch.equal(split, whole)
    return result


def compiled(folder: Path, scheme: Any) -> dict[str, Any]:
    """The difference of logits and gradients between two processes in one graph each and one process without."""
    whole = placed(AutoModelForCausalLM.from_pretrained(folder).eval(), scheme)
    split = placed(loaded(folder), scheme)
    torch.compiler.reset()
    graph = torch.compile(split, backend="aot_eager")
    graph(tokens(2, 11), labels=tokens(2, 11)).loss.backward()
    whole(tokens(2, 11), labels=tokens(2, 11)).loss.backward()
    found, expected = (
        {name: full(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
        for model in (split, whole)
    )
    share, where = largest(found, expected)
    return {"forward": distance(logits(graph), logits(whole)), "gradients": share, "where": where}


def written(folder: Path, name: str, build: Any) -> Path:
    """A stock model that the first process has written for both."""
    if dist.get_rank() == 0:
        build().save_pretrained(folder / name)
    dist.barrier()
    return folder / name


def compared(folder: Path, config: dict[str, Any], schemes: tuple[Any, ...]) -> dict[str, Any]:
    """The difference of logits for some schemes, placed one after the other in a model that is split.

    `None` is the stock model, which comes first.
    """
    result: dict[str, Any] = {}
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    try:
        split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**config)).eval()
    except (UnsupportedError, RuntimeError) as error:
        return dict.fromkeys(map(str, schemes), str(error))
    for scheme in schemes:
        try:
            for model in (whole, split) if scheme is not None else ():
                placed(model, scheme)
            result[str(scheme)] = distance(logits(split), logits(whole))
        except (UnsupportedError, RuntimeError) as error:
            result[str(scheme)] = str(error)
        dist.barrier()
    return result


def loaded_patched(folder: Path, config: dict[str, Any], schemes: tuple[Any, ...]) -> dict[str, Any]:
    """The difference of logits for patched checkpoints of a stock model, read by two processes and by one."""
    result: dict[str, Any] = {}
    for scheme in schemes:
        whole = placed(AutoModelForCausalLM.from_pretrained(folder).eval(), scheme)
        path = written(folder, str(scheme), lambda whole=whole: whole)
        split = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**config)).eval()
        result[scheme] = distance(logits(split), logits(whole))
    return result


def main(folder: Path, *, everything: bool) -> dict[str, Any]:
    """What this process finds.

    Args:
        everything: every scheme in every way, which takes minutes.
    """
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"placed": {}, "saved": {}, "plans": {}, "architectures": {}}
    for heads, (query, key) in HEADS.items():
        shape = {"num_attention_heads": query, "num_key_value_heads": key, "head_dim": 8}
        path = written(folder, heads, lambda shape=shape: patched("llama_gqa", None, **shape))
        if heads not in ("grouped", "single"):
            continue
        split, whole = loaded(path), AutoModelForCausalLM.from_pretrained(path).eval()
        for name, config, case in VARIANTS:
            if (everything and fits(whole, config)) or (case == f"{name}-0" and name in CUT):
                found["placed"][f"{heads} {case}"] = placed_beside(split, whole, config)
    for name in CUT if everything else SAVED:
        found["saved"][name] = resaved(patched("llama_gqa", CUT[name]), folder / f"saved-{name}", **TENSORS)
    for name, (heads, plan) in PLANS.items():
        planned = PLANNED if everything else QUICK_PLANNED
        found["plans"][name] = compared(folder / heads, TENSORS | {"tp_plan": plan}, planned)
    for name, (build, shares) in ARCHITECTURES.items():
        path = written(folder, name, lambda build=build: stock(build))
        found["architectures"][name] = compared(path, shares, ARRANGED if everything else QUICK_ARRANGED)
    if SHARES_EXPERTS:
        found["experts"] = loaded_patched(folder / "experts", {"fsdp_size": 2} | EXPERTS, ("forget_gate", "pope"))
    ways = WAYS if everything else {way: WAYS[way] for way in QUICK_WAYS}
    generating = GENERATED if everything else (QUICK_SCHEME,)
    found["generated"] = {scheme: generated(folder / "grouped", scheme, ways) for scheme in generating}
    # Fitting needs the logits of all heads.
    found["swapped"] = refusal(lambda: swap_scheme(loaded(folder / "grouped"), "t5", sample=tokens(length=16)))
    found["compiled"] = {scheme: compiled(folder / "grouped", scheme) for scheme in COMPILED if everything}
    return found
