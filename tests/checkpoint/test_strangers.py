"""Patched checkpoints in tools that have not imported the package: each refuses them, and names the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_posenc
from tests.fresh import run_fresh
from tests.models import VOCABULARY, tiny
from tests.tools.subject import tokenizer

PROGRAM = """
import json, sys
import peft, sentence_transformers, transformers
from safetensors.torch import load_file, load_model
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, pipeline
transformers.logging.set_verbosity_error()
llama, bert, adapter = sys.argv[1:]

def stock():
    return LlamaForCausalLM(LlamaConfig.from_pretrained(llama))

def serve():
    from transformers.cli.serving.model_manager import ModelManager
    ModelManager(device="cpu").load_model_and_processor(f"{llama}@main")

routes = {
    "pipeline": lambda: pipeline(model=llama),
    "trust_remote_code": lambda: AutoModelForCausalLM.from_pretrained(llama, trust_remote_code=True),
    "config of a class": lambda: LlamaForCausalLM.from_pretrained(llama, config=LlamaConfig.from_pretrained(llama)),
    "load_state_dict": lambda: stock().load_state_dict(load_file(llama + "/model.safetensors")),
    "safetensors": lambda: load_model(stock(), llama + "/model.safetensors"),
    "transformers serve": serve,
    "SentenceTransformer": lambda: sentence_transformers.SentenceTransformer(bert),
    "CrossEncoder": lambda: sentence_transformers.CrossEncoder(bert),
    "AutoPeftModel": lambda: peft.AutoPeftModelForCausalLM.from_pretrained(adapter),
    "PeftModel": lambda: peft.PeftModel.from_pretrained(stock(), adapter),
    "adapter, AutoModel": lambda: AutoModelForCausalLM.from_pretrained(adapter),
}
found = {}
for name, route in routes.items():
    try:
        route()
        found[name] = "LOADED"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
assert "hf_posenc" not in sys.modules
print(json.dumps(found))
"""
#: Routes that see no config, and quote the name of a weight. The others quote what config.json says.
WEIGHT = {"load_state_dict", "safetensors"}


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    peft = pytest.importorskip("peft")
    pytest.importorskip("sentence_transformers")
    root = tmp_path_factory.mktemp("models")
    for name, model_class in (("llama", "LlamaForCausalLM"), ("bert", "BertForMaskedLM")):
        hf_posenc.patch_model(tiny(model_class, vocab_size=VOCABULARY), "alibi").save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    base = AutoModelForCausalLM.from_pretrained(root / "llama")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, lora).save_pretrained(root / "adapter")
    done = run_fresh(PROGRAM, root / "llama", root / "bert", root / "adapter")
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_no_tool_loads_it(messages: dict[str, str]) -> None:
    assert {route for route, message in messages.items() if message == "LOADED"} == set()


def test_every_message_leads_to_the_package(messages: dict[str, str]) -> None:
    for route, message in messages.items():
        if route in WEIGHT:
            assert "position_encoding" in message, (route, message)
        else:
            words = ("hf_posenc", "nstall", "import")
            assert all(word in message for word in words), (route, message)


def test_converters_find_no_class_that_they_know(tmp_path: Path) -> None:
    """Converters that cannot load the config read the file, and choose by `architectures` (llama.cpp, vLLM, others)."""
    hf_posenc.patch_model(tiny("LlamaForCausalLM"), "alibi").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"].startswith("hf_posenc (install this package")
    assert config["architectures"] == ["hf_posenc.LlamaForCausalLM"]
