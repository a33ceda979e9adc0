"""Every adapter method of PEFT, saved and loaded again, padded and generating."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.integrations.subject import (
    argmax_decoding,
    assert_close,
    assert_same_tokens,
    folder,
    left_padded,
    llama,
    tokens,
)
from tests.integrations.tool import Tool

#: Settings of each method for a model 32 wide; what is not named here keeps PEFT's default.
_LINEAR = {"target_modules": ["q_proj", "k_proj", "v_proj"]}
_OF_RANK_4 = {"r": 4, **_LINEAR}
_RANK_4 = (
    *("DEFT", "DELORA", "GLORA", "HIRA", "HRA", "LOHA", "LOKR", "MISS", "PEANUT", "PSOFT", "PVERA", "RANDLORA"),
    *("SHADOW", "VERA"),
)
METHODS: dict[str, dict[str, Any]] = {"LORA": _OF_RANK_4, "LORA (DoRA)": {"use_dora": True, **_OF_RANK_4}}
METHODS |= sorted({
    **dict.fromkeys(_RANK_4, _OF_RANK_4),
    **dict.fromkeys(("FROD", "OSF", "SUPERTUNING"), _LINEAR),
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10, **_LINEAR},
    "ADAMSS": {"r": 4, "num_subspaces": 2, **_LINEAR},
    "BEFT": {"target_modules": ["v_proj"]},
    "BOFT": {"boft_block_size": 4, **_LINEAR},
    "C3A": {"block_size": 8, **_LINEAR},
    "FOURIERFT": {"n_frequency": 16, **_LINEAR},
    "GRALORA": {"r": 4, "gralora_k": 2, **_LINEAR},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {},
    "OFT": {"oft_block_size": 4, "r": 0, **_LINEAR},
    "ROAD": {"group_size": 4, **_LINEAR},
    "SHIRA": {"r": 2, **_LINEAR},
    "TINYLORA": {"r": 2, **_LINEAR},
    "TRAINABLE_TOKENS": {"token_indices": list(range(5, 96))},
    "UNILORA": {"r": 4, "theta_d_length": 64, **_LINEAR},
    "VBLORA": {"r": 2, "num_vectors": 8, "vector_length": 4, **_LINEAR},
    "WAVEFT": {"n_frequency": 16, **_LINEAR},
}.items())  # fmt: skip
#: Methods that put virtual tokens or cached keys in front of the input.
PROMPTS: dict[str, dict[str, Any]] = {
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2, "num_ranks": 1},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "CPT": {"cpt_token_ids": [5, 6, 7, 8], "cpt_mask": [1, 1, 1, 1], "cpt_tokens_type_mask": [1, 1, 2, 2]},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
}
#: Why a method has no row.
WITHOUT_ROW = {
    "LILY": "PEFT 0.21.2 cannot load an adapter that it saved, with a stock model either",
    "XLORA": "mixes several saved LoRA adapters, whose row is LORA's",
    "POLY": "needs task_ids in every call, which generate does not pass",
}


def _config(name: str, settings: dict[str, Any]) -> Any:
    from peft import TaskType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils import PeftType

    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name.split(" ")[0])]
    return config_class(task_type=TaskType.CAUSAL_LM, **copy.deepcopy(settings))


def _adapted(base: Any, name: str, settings: dict[str, Any]) -> Any:
    """An adapter whose weights are as large as trained ones."""
    from peft import get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(base, _config(name, settings)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def _logits(model: Any, arguments: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(**arguments).logits


def _method(name: str, settings: dict[str, Any], prompts: bool = False) -> Any:
    def check(scheme: Any) -> None:
        from peft import PeftModel

        prompt = tokens(2, 9)
        extra = {"task_ids": torch.zeros(2, dtype=torch.long)} if name.startswith("MULTITASK") else {}
        alone = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), **extra}
        base = llama(scheme)
        before = _logits(base, {"input_ids": prompt})
        model = _adapted(base, name, settings)
        expected = _logits(model, alone)
        assert (expected[:, -9:] - before).abs().max() > 1e-3, "the adapter does nothing"
        if name != "ADAPTION_PROMPT":  # in a stock Llama, prompts see the position of a query in its padded row
            padded = _logits(model, left_padded(prompt) | extra)
            assert_close(padded[:, -9:], expected[:, -9:])
        with folder() as path:
            model.save_pretrained(path)
            again = PeftModel.from_pretrained(llama(scheme), path).eval()
        assert_close(_logits(again, alone), expected)
        if name == "ADAPTION_PROMPT":
            return  # its own attention has no generation with a cache in PEFT
        found = model.generate(**alone, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
        if not prompts:
            assert_same_tokens(found, argmax_decoding(model, prompt, 5))
            return
        ids = prompt
        for _ in range(5):
            logits = _logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **extra})
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
        assert_same_tokens(found[:, -14:], ids)
        padded_found = model.generate(
            **left_padded(prompt), **extra, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert_same_tokens(padded_found[:, -14:], ids)

    return check


_ORACLE = "left-padded rows = each alone; saved and loaded; generate = no cache"
TOOLS = [
    Tool("PEFT", name, _method(name, settings, prompts), _ORACLE, ("peft",))
    for table, prompts in ((METHODS, False), (PROMPTS, True))
    for name, settings in table.items()
]
