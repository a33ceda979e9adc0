"""The healing study: what it trains, what it keeps, what it refuses, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    DefaultFlowCallback,
    LlamaConfig,
    LlamaForCausalLM,
    set_seed,
)

from hf_posenc.recipes import GradualSwapCallback
from training import heal
from training.errors import SettingsError
from training.healing.arguments import HealingArguments
from training.healing.embedding import Texts, teacher_states
from training.healing.report import format_table
from training.healing.study import parse_study


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    set_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_theta=500.0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    set_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz,."
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=24,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def _words(model: Path, text: Path, folder: Path, cells: list[dict[str, Any]], **changes: Any) -> list[str]:
    options: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name": text,
        "validation_split_percentage": 25,
        "output_dir": folder,
        "cells": json.dumps(cells),
        "lengths": [16, 32],
        "eval_windows": 2,
        "block_size": 24,
        "packing": "concatenate",
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    } | changes
    words: list[str] = []
    for name, value in options.items():
        words += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    return words


def _causal(llama: Path, text: Path, folder: Path, cells: list[dict[str, Any]], **changes: Any) -> list[str]:
    return _words(llama, text, folder, cells, tokenizer_name="bytes", **changes)


CELLS = [
    {"name": "control"},
    {"name": "t5 fitted", "scheme": "t5", "initialization": "fitted"},
    {"name": "alibi gradual", "scheme": "alibi", "gradual_steps": 2},
    {
        "name": "p_rope distilled",
        "scheme": "p_rope",
        "scheme_options": {"fraction": 0.5},
        "initialization": "auto",
        "distill": True,
    },
    {"name": "none lora", "scheme": "none", "lora": True},
]


def test_a_study_trains_every_cell_once(llama, text_folder, tmp_path, capsys):
    words = _causal(llama, text_folder, tmp_path / "out", CELLS)
    assert heal.main(words) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [cell["name"] for cell in results["cells"]] == [cell["name"] for cell in CELLS]
    found = {cell["name"]: cell for cell in results["cells"]}
    for cell in found.values():
        assert cell["status"] == "finished"
        assert cell["curve"]["step"] == [0, 2, 4]
        assert cell["train_curve"]["step"] == [1, 2, 3, 4]
        assert len(cell["start_by_length"]) == len(cell["end_by_length"]) == 2
        # The untouched, the swapped and the trained model are measured on the same text.
        assert cell["end_by_length"] != cell["start_by_length"]
    assert found["alibi gradual"]["start_by_length"] == pytest.approx(found["control"]["start_by_length"], abs=1e-5)
    assert found["none lora"]["start_by_length"] != pytest.approx(found["control"]["start_by_length"], abs=1e-5)
    assert found["t5 fitted"]["swap"]["fits"][0]["residual"] < 1
    assert found["p_rope distilled"]["swap"]["options"] == {"theta": 500.0}
    assert found["none lora"]["trained_parameters"] < found["control"]["trained_parameters"]
    assert found["p_rope distilled"]["curve"]["value"][-1] != found["control"]["curve"]["value"][-1]
    table = (tmp_path / "out" / "table.md").read_text()
    assert all(f"| {cell['name']} |" in table for cell in CELLS)
    assert (tmp_path / "out" / "plots" / "healing_curves.png").stat().st_size > 1000
    assert (tmp_path / "out" / "plots" / "by_length_healed.svg").exists()
    assert not list((tmp_path / "out").rglob("checkpoint-*"))
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text()

    # The same command again takes what there is; another one is not taken for it.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")}
    assert heal.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")} == stamps
    capsys.readouterr()
    assert heal.main([*words, "--learning_rate=0.02"]) == 2
    assert "learning_rate was 0.01 and is 0.02" in capsys.readouterr().err


def test_an_interrupted_cell_goes_on_where_it_was(llama, text_folder, tmp_path, monkeypatch):
    cells = [{"name": "control", "max_steps": 1}, {"name": "t5 gradual", "scheme": "t5", "gradual_steps": 3}]
    assert heal.main(_causal(llama, text_folder, tmp_path / "whole", cells)) == 0
    whole = json.loads((tmp_path / "whole" / "results.json").read_text())["cells"][1]

    words = _causal(llama, text_folder, tmp_path / "cut", cells)
    begin = GradualSwapCallback.on_step_begin

    def interrupted(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt
        begin(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(GradualSwapCallback, "on_step_begin", interrupted)
        assert heal.main(words) == 130
    assert heal.main(words) == 0
    cut = json.loads((tmp_path / "cut" / "results.json").read_text())["cells"][1]
    for key in ("curve", "train_curve", "start_by_length", "end_by_length", "swap"):
        assert cut[key] == whole[key]


def test_a_swap_that_cannot_be_stops_its_cell_only(llama, text_folder, tmp_path, capsys):
    cells = [{"name": "alibi fitted", "scheme": "alibi", "initialization": "fitted"}, {"name": "control"}]
    assert heal.main(_causal(llama, text_folder, tmp_path, cells, max_steps=1, seeds=[0, 1])) == 1
    found = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [(cell["name"], cell["seed"], cell["status"]) for cell in found] == [
        ("alibi fitted", 0, "stopped"),
        ("alibi fitted", 1, "stopped"),
        ("control", 0, "finished"),
        ("control", 1, "finished"),
    ]
    stopped, _, first, second = found
    assert first["end_by_length"] != second["end_by_length"]
    assert "learnable=True" in stopped["reason"]
    assert "learnable=True" in (tmp_path / "table.md").read_text()
    assert "2 cell(s) had to stop: alibi fitted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cells", "changes", "message"),
    [
        ([], {}, "a list of mappings"),
        ([{"scheme": "alibi"}], {}, "A cell is named None"),
        ([{"name": "../x"}], {}, r"named '\.\./x'"),
        ([{"name": "a"}, {"name": "b"}], {}, "one control"),
        ([{"name": "a", "scheme": "none"}], {}, "one control"),
        ([{"name": "a"}, {"name": "a", "scheme": "none"}], {}, "the same name"),
        ([{"name": "a b"}, {"name": "A_b", "scheme": "none"}], {}, "names of the same folder"),
        ([{"name": "a"}, {"name": "b", "scheme": "none", "seed": 3}], {}, "seed is the same for every cell"),
        ([{"name": "a"}, {"name": "b", "scheme": "none", "lengths": [16]}], {}, "lengths is the same for every cell"),
        ([{"name": "a"}, {"name": "b", "sheme": "none"}], {}, "Cell 'b': Unknown option --sheme.*--scheme"),
        ([{"name": "a"}, {"name": "b", "scheme": "none", "gradual_steps": -1}], {}, "gradual_steps is -1"),
        ([{"name": "a"}, {"name": "b", "scheme": "none", "distill_weight": 0.3}], {}, "without --distill"),
        ([{"name": "a"}, {"name": "b", "scheme": "learned", "table_extension": "last"}], {}, "--initialization fitted"),
        ([{"name": "a"}], {"train_lengths": [8]}, "for --objective embedding"),
        ([{"name": "a"}], {"lengths": [4]}, "at least 8"),
    ],
)
def test_studies_that_cannot_work_are_refused_before_anything_is_trained(
    llama, text_folder, tmp_path, cells, changes, message
):
    with pytest.raises(SettingsError, match=message):
        parse_study(_causal(llama, text_folder, tmp_path / "out", cells, **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distill": True, "distill_temperature": 0.0}, "distill_temperature is 0"),
        ({"distill": True, "distill_weight": 1.5}, r"distill_weight is 1\.5"),
        ({"distill_temperature": 3.0}, "without --distill"),
    ],
)
def test_wrong_options_of_a_swap_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        HealingArguments(**options)


@pytest.mark.parametrize(
    "cell",
    [
        {"name": "b", "gradual_steps": 2},
        {"name": "b", "initialization": "fitted"},
        {"name": "b", "scheme": "none", "gradual_steps": 2, "lora": True},
    ],
)
def test_swaps_that_make_no_sense_stop(llama, text_folder, tmp_path, cell):
    cells = [cell] if "scheme" not in cell else [{"name": "a"}, cell]
    heal.main(_causal(llama, text_folder, tmp_path, cells, max_steps=1))
    last = json.loads((tmp_path / "results.json").read_text())["cells"][-1]
    assert last["status"] == "stopped"
    assert "--scheme" in last["reason"] or "--lora" in last["reason"]


# Sentence encoders


def test_a_teacher_of_limited_length_reads_longer_text_in_pieces(bert, text_folder):
    from training.arguments import DataArguments
    from training.data.rows import load_rows

    tokenizer = BertTokenizer.from_pretrained(bert)
    data = DataArguments(dataset_name=str(text_folder), block_size=24, validation_split_percentage=25)
    rows, _, _ = load_rows(data, tokenizer, True, seed=0)
    texts, teacher = Texts(rows.stream, tokenizer), BertModel.from_pretrained(bert, add_pooling_layer=False).eval()
    short, long = texts.row(5, 20)[None], texts.row(5, 60)[None]
    assert short[0, 0] == tokenizer.cls_token_id
    assert long[0, -1] == tokenizer.sep_token_id
    with torch.no_grad():
        assert torch.equal(teacher_states(teacher, texts, short, 24), teacher(input_ids=short).last_hidden_state)
        states = teacher_states(teacher, texts, long, 24)
        second = teacher(input_ids=texts.framed(long[:, 23:45])).last_hidden_state
    assert states.shape == (1, 60, 32)
    assert torch.equal(states[:, 23:45], second[:, 1:-1])


def test_an_encoder_is_led_past_its_length(bert, text_folder, tmp_path):
    cells = [
        {"name": "control", "train_lengths": [16, 24]},
        {"name": "repeat", "scheme": "learned", "scheme_options": {"num_positions": 64}, "initialization": "fitted",
         "table_extension": "repeat"},
        {"name": "alibi gradual", "scheme": "alibi", "gradual_steps": 4, "train_lengths": [16, 24]},
        {"name": "too long", "scheme": "alibi", "gradual_steps": 4},
    ]  # fmt: skip
    words = _words(
        bert, text_folder, tmp_path, cells, objective="embedding", lengths=[16, 24, 64], train_lengths=[16, 64],
        max_steps=8, eval_steps=4, per_device_train_batch_size=2, learning_rate=3e-3,
    )  # fmt: skip
    assert heal.main(words) == 1
    control, repeat, alibi, too_long = json.loads((tmp_path / "results.json").read_text())["cells"]
    # While the old table acts, nothing can be longer than it.
    assert "24 positions of the learned table" in too_long["reason"]
    # The untouched encoder is its own teacher, and has no position 64.
    assert control["start_by_length"] == [pytest.approx(1), pytest.approx(1), None]
    # The first rows are as they were.
    assert repeat["start_by_length"][:2] == [pytest.approx(1), pytest.approx(1)]
    assert repeat["start_by_length"][2] < 0.9999
    assert alibi["start_by_length"] == [pytest.approx(1), pytest.approx(1), None]
    assert all(0 < value <= 1.0001 for cell in (repeat, alibi) for value in cell["end_by_length"])
    assert "cosine at 64, healed" in (tmp_path / "table.md").read_text()


def test_an_interrupted_encoder_goes_on_with_the_same_settings_only(bert, text_folder, tmp_path, monkeypatch, capsys):
    cells = [{"name": "control"}]
    words = _words(bert, text_folder, tmp_path, cells, objective="embedding", lengths=[16], max_steps=3, eval_steps=3)

    def interrupted(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DefaultFlowCallback, "on_step_begin", interrupted)
        assert heal.main(words) == 130
    capsys.readouterr()
    assert heal.main([*words, "--learning_rate=0.5"]) == 1
    assert "learning_rate was 0.01 and is now 0.5" in capsys.readouterr().err
    # A checkpoint that was cut off is passed over.
    (tmp_path / "control" / "seed-0" / "checkpoint-2" / "optimizer.pt").write_bytes(b"PK")
    assert heal.main(words) == 0
    (cell,) = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert cell["train_curve"]["step"] == [1, 2, 3]


def test_a_cell_that_was_trained_for_less_says_so():
    def cell(name: str, steps: int) -> dict[str, Any]:
        curve = {"step": [0, steps], "value": [2.0, 1.0]}
        return {"name": name, "seed": 0, "control": name == "control", "status": "finished", "curve": curve,
                "quantity": "loss", "lengths": [16], "start_by_length": [2.0], "end_by_length": [1.0],
                "seconds": 1.0, "swap": None, "reasons": []}  # fmt: skip

    table = format_table(
        {"study": {"objective": "causal", "description": ""}, "cells": [cell("control", 4), cell("alibi", 2)]}
    )
    assert "`alibi` was trained for 2 steps only" in table
    assert "`control` was trained for" not in table


def test_a_table_of_nothing():
    assert "No cell has finished" in format_table({"study": {"objective": "causal", "description": ""}, "cells": []})
