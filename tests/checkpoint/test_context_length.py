"""A model with another length than its stock architecture comes back with it, in a process of its own too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, LlamaForCausalLM

import hf_posenc
from hf_posenc import (
    CheckpointError,
    DynamicScaling,
    LearnedConfig,
    LinearScaling,
    NtkScaling,
    RopeConfig,
    YarnScaling,
    export_model,
    extend_context,
    patch_model,
    unpatch_model,
)
from tests.checkpoint.checkpoint_cases import outputs, t5
from tests.fresh import run_fresh
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import patched, tokens

torch.set_num_threads(1)

LONG = 1024
NATIVE = 64

RELOAD = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
import hf_posenc
import transformers
from safetensors.torch import load_file
results = {}


def stated(model):
    found = vars(model.config)
    return found.get("max_position_embeddings", found.get("n_positions"))


for folder in sorted(Path(sys.argv[1]).iterdir()):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0].removeprefix("hf_posenc.")
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    reference = load_file(folder / "reference.st")
    ids = reference["ids"]
    arguments = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=False, **arguments).logits
    difference = float((found - reference["outputs"]).abs().max())
    lengths = model.position_encoding.lengths
    found = [difference, stated(model), lengths.current, lengths.native]
    generation = getattr(model, "generation_config", None)
    hf_posenc.unpatch_model(model)
    results[folder.name] = found + [stated(model),
                                    None if generation is None else generation.max_length]
print("RESULTS " + json.dumps(results))
"""


def fresh(code: str, *arguments: str) -> Any:
    done = run_fresh(code, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULTS ")[1])


@torch.no_grad()
def test_a_fresh_process_gives_the_same_numbers_at_the_new_length(tmp_path: Path) -> None:
    models = {name: patched(name, "alibi") for name in ("bert", "roberta", "gpt2", "llama_gqa", "bart")}
    for model in models.values():
        model.set_attn_implementation("sdpa")  # what from_pretrained chooses
    models["t5"] = patch_model(t5(), "alibi")
    # The config of a published T5 states a length, although its own class has none.
    models["t5_published"] = patch_model(t5(n_positions=512), "alibi")
    expected: dict[str, list[Any]] = {}
    for name, model in models.items():
        stated = model.eval().config.to_dict()
        native_value = stated.get("max_position_embeddings", stated.get("n_positions"))
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.max_length = native_value
        extend_context(model, length=LONG)
        model.save_pretrained(tmp_path / name)
        ids = tokens(1, LONG).clamp(max=63)
        references = {"ids": ids, "outputs": outputs(model, ids)}
        save_file(references, tmp_path / name / "reference.st")
        before = 2 if name == "roberta" else 0
        if native_value is None:
            # There is nothing in the config to save it in.
            expected[name] = [0.0, None, None, None, None, None]
        else:
            limit = None if generation is None else native_value
            expected[name] = [0.0, LONG + before, LONG, native_value - before, native_value, limit]
    assert fresh(RELOAD, str(tmp_path)) == expected


def test_a_saved_stock_model_is_the_same_after_a_length_has_come_and_gone(tmp_path: Path) -> None:
    model = ARCHITECTURES["bert"].build()
    model.save_pretrained(tmp_path / "stock")
    unpatch_model(extend_context(patch_model(model, "alibi"), length=LONG)).save_pretrained(tmp_path / "undone")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "undone" / name).read_bytes()
    extend_context(patch_model(model, "alibi"), length=LONG).save_pretrained(tmp_path / "patched")
    unpatch_model(AutoModelForMaskedLM.from_pretrained(tmp_path / "patched")).save_pretrained(tmp_path / "again")
    assert (tmp_path / "stock" / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    entry = config["position_encoding"]
    entry.update({key: value for key, value in changes.items() if key in entry})
    config.update({key: value for key, value in changes.items() if key not in entry})
    path.write_text(json.dumps(config))


@torch.no_grad()
def test_a_length_that_was_edited_by_hand_is_followed_where_the_scheme_reaches_it(tmp_path: Path) -> None:
    patched("bert", "alibi").save_pretrained(tmp_path)
    edit(tmp_path, max_position_embeddings=300)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert model.position_encoding.lengths.current == 300
    assert model.bert.embeddings.position_embeddings.weight.shape[0] == NATIVE
    assert model(tokens(1, 300)).logits.shape[1] == 300
    assert AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tmp_path)).config.max_position_embeddings == 300


def test_a_length_that_was_edited_past_the_scheme_names_extend_context(tmp_path: Path) -> None:
    patched("bert", LearnedConfig(num_positions=100)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 100
    edit(tmp_path, max_position_embeddings=101)
    with pytest.raises(CheckpointError, match=r"101.*100 positions.*Restore.*64.*extend_context"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"native_lengths": 512},
        {"native_lengths": {"max_position_embeddings": "64"}},
        {"native_lengths": {"max_position_embeddings": 0}},
        {"native_lengths": {"max_position_embeddings": True}},
        {"native_lengths": {"max_position_embeddings": 2**31}},
        {"native_lengths": {"hidden_size": 64}},
        {"native_lengths": {"text_config.max_position_embeddings": 64}},
        {"max_position_embeddings": "many"},
        {"max_position_embeddings": None},
    ],
)
def test_damaged_lengths_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    patched("bert", "alibi").save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match="native_lengths"):
        AutoModel.from_pretrained(tmp_path)


def test_a_checkpoint_without_native_lengths_has_those_of_its_config(tmp_path: Path) -> None:
    model = patched("bert", "alibi")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["position_encoding"]["native_lengths"]
    path.write_text(json.dumps(config))
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).position_encoding.lengths.current == NATIVE


STOCK = """
import json, sys, torch
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
reference = load_file(sys.argv[1] + "/reference.st")
with torch.no_grad():
    difference = float((model(reference["ids"]).logits - reference["outputs"]).abs().max())
print("RESULTS " + json.dumps([model.config.max_position_embeddings, difference, "hf_posenc" in sys.modules]))
"""


@torch.no_grad()
def test_a_stock_export_states_the_length_that_yarn_was_made_for(tmp_path: Path) -> None:
    model = patched("llama_gqa", RopeConfig(theta=500.0, scaling=YarnScaling(4.0, NATIVE))).eval()
    model.set_attn_implementation("sdpa")  # what from_pretrained chooses
    export_model(model, tmp_path / "yarn")
    ids = tokens(1, 4 * NATIVE)
    save_file({"ids": ids, "outputs": model(ids).logits}, tmp_path / "yarn" / "reference.st")
    length, difference, imported = fresh(STOCK, str(tmp_path / "yarn"))
    assert (length, imported) == (4 * NATIVE, False)
    # The tolerance of the export itself: stock code multiplies in another order.
    assert difference <= 1e-5


@pytest.mark.parametrize(
    ("scheme", "length", "expected"),
    [
        (RopeConfig(scaling=YarnScaling(4.0, NATIVE // 4)), None, NATIVE),
        (RopeConfig(scaling=LinearScaling(2.0)), None, 2 * NATIVE),
        (RopeConfig(scaling=NtkScaling(2.0)), None, 2 * NATIVE),
        (RopeConfig(scaling=YarnScaling(4.0, NATIVE)), 100, 100),
        ("native", None, NATIVE),
        # A stock dynamic scaling starts where its config says that the model ends.
        (RopeConfig(scaling=DynamicScaling(2.0, NATIVE)), 256, NATIVE),
    ],
)
def test_the_length_of_a_stock_export(tmp_path: Path, scheme: Any, length: int | None, expected: int) -> None:
    model = patched("llama_gqa", scheme)
    if length is not None:
        extend_context(model, length=length)
    export_model(model, tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert isinstance(stock, LlamaForCausalLM)
    assert stock.config.max_position_embeddings == expected
    assert not hasattr(stock, "position_encoding")


@pytest.mark.parametrize("length", [None, 100])
def test_an_exported_table_keeps_its_rows_whatever_the_length(tmp_path: Path, length: int | None) -> None:
    model = patched("roberta", LearnedConfig(num_positions=200))
    assert model.config.max_position_embeddings == 202
    if length is not None:
        extend_context(model, length=length)
    export_model(model, tmp_path / "stock")
    stock = AutoModelForMaskedLM.from_pretrained(tmp_path / "stock")
    assert stock.config.max_position_embeddings == stock.roberta.embeddings.position_embeddings.weight.shape[0] == 202


def test_a_card_says_the_length(tmp_path: Path) -> None:
    from hf_posenc.checkpoint.cards import model_card

    model = extend_context(patched("bert", "alibi"), length=LONG)
    assert f"context: {LONG} tokens, {NATIVE} natively" in str(model_card(model, model_id="me/bert-alibi"))
    assert hf_posenc.extend_context is extend_context
