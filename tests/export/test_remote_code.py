"""The target "remote_code": folders that a process without this package loads with trust_remote_code=True."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc import (
    AlibiConfig,
    ClippedScaling,
    ComposedConfig,
    ForgetGateConfig,
    InterleavedConfig,
    KerpleConfig,
    LearnedConfig,
    LinearScaling,
    RopeConfig,
    SinusoidalConfig,
    T5Config,
    UnsupportedError,
    YarnScaling,
)
from tests.export.models import visible
from tests.fresh import printed, run_fresh

DECODERS: dict[str, Any] = {
    "alibi": "alibi",
    "alibi, learned": AlibiConfig(learnable=True),
    "t5": T5Config(num_buckets=8, max_distance=12),
    "t5, own table in each layer": T5Config(num_buckets=8, max_distance=12, shared=False),
    "kerple": "kerple",
    "kerple, power": KerpleConfig(variant="power", minimum=0.001),
    "rope": RopeConfig(theta=500.0),
    "rope, linear": RopeConfig(scaling=LinearScaling(4.0)),
    "rope, yarn": RopeConfig(scaling=YarnScaling(4.0, original_max_positions=16)),
    "rope, clipped": RopeConfig(scaling=ClippedScaling(3)),
    "rope, interleaved pairs": RopeConfig(layout="interleaved"),
    "p_rope": "p_rope",
    "none": "none",
    "learned": LearnedConfig(num_positions=80),
    "sinusoidal": "sinusoidal",
    "forget_gate": "forget_gate",
    "forget_gate, constant": ForgetGateConfig(gate="bias_only"),
    "forget_gate with rope": ComposedConfig((ForgetGateConfig(), RopeConfig())),
}
ENCODERS: dict[str, Any] = {
    "alibi": "alibi",
    "alibi, asymmetric": AlibiConfig(variant="asymmetric"),
    "t5": "t5",
    "kerple": "kerple",
    "rope": "rope",
    "none": "none",
    "learned": LearnedConfig(num_positions=80),
    "sinusoidal": SinusoidalConfig(frequencies="tensor2tensor", layout="concatenated"),
}
OTHERS = {
    "mistral": ("MistralForCausalLM", "t5", {"sliding_window": 6}),
    "qwen3": ("Qwen3ForCausalLM", "alibi", {}),
    "roberta": ("RobertaForMaskedLM", LearnedConfig(num_positions=64, offset=2), {"pad_token_id": 1}),
    "electra": ("ElectraForMaskedLM", "rope", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "classifier": ("LlamaForSequenceClassification", "kerple", {"num_labels": 3, "pad_token_id": 0}),
    "base": ("BertModel", "t5", {}),
}
CASES = {
    **{f"llama {name}": ("LlamaForCausalLM", scheme, {}) for name, scheme in DECODERS.items()},
    **{f"bert {name}": ("BertForMaskedLM", scheme, {}) for name, scheme in ENCODERS.items()},
    **OTHERS,
}
AUTO = {"CausalLM": "AutoModelForCausalLM", "MaskedLM": "AutoModelForMaskedLM", "BertModel": "AutoModel"}

#: What a model computes; the same code runs in both processes.
READINGS = """
def readings(model):
    import torch
    found = {}
    ids = torch.randint(5, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    left = torch.ones_like(ids)
    left[0, :7] = 0
    holes = torch.ones_like(ids)
    holes[1, 5:8] = 0
    decodes = model.can_generate()
    causal = model.base_model_prefix == "model"
    masks = {"left": left, "holes": holes} | ({} if causal else {"right": left.flip(-1)})
    def outputs(**inputs):
        output = model(**inputs, return_dict=True)
        return output["logits"] if "logits" in output else output["last_hidden_state"]
    for backend in ("sdpa", "eager"):
        model.set_attn_implementation(backend)
        with torch.no_grad():
            for name, mask in masks.items():
                output = outputs(input_ids=ids, attention_mask=mask)
                found[f"{name}, {backend}"] = output if output.ndim == 2 else output[mask.bool()]
            if causal:
                twice = torch.arange(10).repeat(2).unsqueeze(0)
                found[f"packed, {backend}"] = outputs(input_ids=ids[:1], position_ids=twice, use_cache=False)
    model.set_attn_implementation("sdpa")
    if decodes:
        more = {"attention_mask": left, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
        found["tokens"] = model.generate(ids, do_sample=False, **more)
        found["tokens of beams"] = model.generate(ids, do_sample=False, num_beams=3, **more)
        with torch.no_grad():
            first = model(ids[:, :12], attention_mask=left[:, :12], use_cache=True)
            cache = first.get("cache", first.get("past_key_values"))
            for start, stop in ((12, 13), (13, 17), (17, 20)):
                name = "cache" if "cache" in first else "past_key_values"
                step = model(ids[:, start:stop], attention_mask=left[:, :stop], **{name: cache})
                found[f"cached {start}"] = step.logits
    model.zero_grad()
    model.train()
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    mask = masks["left"]
    (outputs(input_ids=ids, attention_mask=mask)[:, -3:].square().mean() / 7).backward()
    model.gradient_checkpointing_disable()
    model.eval()
    found["gradient of embeddings"] = model.get_input_embeddings().weight.grad.clone()
    own = [weight.grad for name, weight in model.named_parameters() if "position" in name and weight.grad is not None]
    found["gradient of positions"] = torch.stack([one.square().sum() for one in own]).sum() if own else torch.zeros(())
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float64):
            found[str(dtype)] = outputs_in(dtype, model, ids, mask)
    return found

def outputs_in(dtype, model, ids, mask):
    import copy
    output = copy.deepcopy(model).to(dtype)(ids, attention_mask=mask, return_dict=True)
    output = output["logits"] if "logits" in output else output["last_hidden_state"]
    return (output if output.ndim == 2 else output[mask.bool()]).float()
"""

IN_PLAIN_TRANSFORMERS = """
import json, sys, warnings
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_posenc":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert "hf_posenc" not in sys.modules
sys.meta_path.insert(0, Absent())
import torch, transformers
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
folder, found = Path(sys.argv[1]), {}
for place in sorted(folder.iterdir()):
    expected = torch.load(place / "expected.pt")
    auto = getattr(transformers, (place / "auto.txt").read_text())
    model = auto.from_pretrained(place, trust_remote_code=True, dtype=torch.float32).eval()
    now = readings(model)
    assert now.keys() == expected.keys(), (place.name, sorted(now), sorted(expected))
    differences = {}
    for name, value in now.items():
        scale = expected[name].abs().max().clamp(min=1.0)
        same_shape = value.shape == expected[name].shape
        differences[name] = float((value - expected[name]).abs().max() / scale) if same_shape else float("inf")
    model.save_pretrained(place / "again")
    again = auto.from_pretrained(place / "again", trust_remote_code=True).eval()
    ids = torch.arange(5, 25).unsqueeze(0)
    with torch.no_grad():
        differences["saved again"] = float((again(ids)[0] - model(ids)[0]).abs().max())
    found[place.name] = differences
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    home, names = tmp_path_factory.mktemp("remote_code"), {}
    exec(READINGS, names)
    for number, (model_class, scheme, options) in enumerate(CASES.values()):
        model, place = visible(model_class, scheme, **options), home / f"case{number}"
        report = hf_posenc.export_model(model, place, to="remote_code")
        assert "modeling_positions.py" in report.files
        auto = next((auto for end, auto in AUTO.items() if model_class.endswith(end)), None)
        (place / "auto.txt").write_text(auto or "AutoModelForSequenceClassification")
        torch.save(names["readings"](model), place / "expected.pt")
    environment = {"HF_MODULES_CACHE": str(tmp_path_factory.mktemp("modules"))}
    found = json.loads(
        printed(run_fresh(READINGS + IN_PLAIN_TRANSFORMERS, home, environment=environment)).splitlines()[-1]
    )
    return {name: found[f"case{number}"] for number, name in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_a_process_without_the_package_gets_equal_numbers(case: str, differences: dict[str, dict[str, float]]) -> None:
    found = dict(differences[case])
    # bfloat16 has 8 bits, and the two sum in other orders.
    assert found.pop("torch.bfloat16") < 0.05
    assert found.pop("saved again") == 0.0
    for name in ("tokens", "tokens of beams"):
        assert found.pop(name, 0.0) == 0.0, name
    assert {name: value for name, value in found.items() if not value <= 1e-5} == {}


REFUSED = {
    "fire": ("LlamaForCausalLM", "fire", "has no FireBias"),
    "ssmax": ("LlamaForCausalLM", "ssmax", "cannot multiply logits by a factor"),
    "schedule": ("LlamaForCausalLM", InterleavedConfig(every=2), "different frequencies"),
    "half of a head": ("LlamaForCausalLM", RopeConfig(rotary_dim=4), "rotates 8 dimensions of a head"),
    "stablelm": ("StableLmForCausalLM", "alibi", "do not pass the positions of tokens to their attention"),
    "gpt2": ("GPT2LMHeadModel", "alibi", "written for decoders like Llama"),
    "stock": ("LlamaForCausalLM", None, "Use save_pretrained"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_file_cannot_carry_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    model_class, scheme, reason = REFUSED[case]
    with pytest.raises(UnsupportedError, match=reason) as refusal:
        hf_posenc.export_model(visible(model_class, scheme), tmp_path / "export", to="remote_code")
    assert "What can be done:" in str(refusal.value)
    assert not (tmp_path / "export").exists()


def test_other_refusals_propose_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"export it to 'remote_code'.*PositionedLlamaForCausalLM"):
        hf_posenc.export_model(visible("LlamaForCausalLM", "kerple"), tmp_path / "export")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote") / "alibi"
    hf_posenc.export_model(visible("LlamaForCausalLM", "alibi"), folder, to="remote_code")
    return folder


def test_the_file_is_one_and_imports_torch_and_transformers_only(exported: Path) -> None:
    (file,) = exported.glob("*.py")
    tree = ast.parse(file.read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name.partition(".")[0] for name in found} - {
        *("__future__", "collections", "functools", "inspect", "math", "sys", "typing", "torch", "transformers")
    }
    assert ours == set()
    assert "trust_remote_code=True" in (exported / "README.md").read_text()


OTHER_ROUTES = """
import sys
import torch, transformers
transformers.logging.set_verbosity_error()
place = sys.argv[1]
ids = torch.arange(5, 21).unsqueeze(0)

def error(call):
    try:
        call()
    except Exception as found:
        return str(found)
    return "no error"

assert "trust_remote_code" in error(lambda: transformers.AutoModelForCausalLM.from_pretrained(place))
assert "trust_remote_code" in error(lambda: transformers.LlamaForCausalLM.from_pretrained(place))
trusted = dict(trust_remote_code=True)
model = transformers.AutoModelForCausalLM.from_pretrained(place, **trusted)
expected = model(ids, output_hidden_states=True)
base = transformers.AutoModel.from_pretrained(place, **trusted)
assert torch.equal(base(ids).last_hidden_state, expected.hidden_states[-1])
classifier = transformers.AutoModelForSequenceClassification.from_pretrained(place, num_labels=3, **trusted)
assert torch.equal(classifier.model(ids).last_hidden_state, expected.hidden_states[-1])
fresh = transformers.AutoModelForCausalLM.from_config(model.config, **trusted)
assert type(fresh).__name__ == "PositionedLlamaForCausalLM"
assert "Use DynamicCache" in error(lambda: model.generate(ids, max_new_tokens=2, cache_implementation="static"))
model.set_attn_implementation("flex_attention")
refusal = error(lambda: model(ids))
assert "accepts no bias" in refusal, refusal
if len(sys.argv) > 2:
    import hf_posenc
    model = transformers.AutoModelForCausalLM.from_pretrained(place, **trusted)
    assert torch.equal(model(ids).logits, expected.logits)
    for call in (lambda: hf_posenc.patch_model(model, "t5"), lambda: hf_posenc.export_model(model, place + "2")):
        assert "runs the code of an export" in error(call)
"""


@pytest.mark.parametrize("more", [(), ("with the package",)], ids=["without", "with"])
def test_other_routes_give_the_same_model_or_an_error(more: tuple[str, ...], exported: Path, tmp_path: Path) -> None:
    printed(run_fresh(OTHER_ROUTES, exported, *more, environment={"HF_MODULES_CACHE": str(tmp_path)}))
