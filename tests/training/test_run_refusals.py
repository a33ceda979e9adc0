"""What run_clm refuses: one message, status 2, nothing written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.run_cases import SIZES, refused, run, trained_on, words, write_texts

FROM_SCRATCH = {
    "model_name_or_path": None, "model_type": "bert", "config_overrides": json.dumps(SIZES), "tokenizer_name": "bytes",
}  # fmt: skip
FAR: dict[str, Any] = {"packing": "concatenate", "pose_length": 200}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown scheme": ({"scheme": "alibbi"}, "Unknown scheme 'alibbi'. Did you mean 'alibi'"),
    "unknown option": (
        {"scheme": "rope", "scheme_options": '{"thetta": 1}'}, "Unknown option 'thetta' of scheme 'rope'. Did you mean",
    ),
    "value of an option": ({"scheme": "rope", "scheme_options": '{"theta": -1}'}, "theta is -1"),
    "options that are no mapping": ({"scheme": "rope", "scheme_options": "[1]"}, "not a mapping of options"),
    "options that are no JSON": ({"scheme": "rope", "scheme_options": '{"a": '}, "neither JSON nor YAML"),
    "options without a scheme": ({"scheme_options": '{"theta": 1}'}, "--scheme_options is given without --scheme"),
    "a blend in one layer": (
        {"scheme": "alibi", "scheme_layers": "0", "gradual_steps": 2, "model_type": None, "config_overrides": None}
        | {"model_name_or_path": "x"},
        "--gradual_steps has no effect together with --scheme_layers",
    ),
    "a layer that is not there": ({"scheme": "alibi", "scheme_layers": "0,7"}, "contains [7]"),
    "corpus too small": ({"block_size": 60_000, "scheme": "alibi"}, "one row needs 60000"),
    "too few rows": ({"per_device_train_batch_size": 10_000}, "one update needs 10000"),
    "unknown column": ({"text_column": "txt"}, "no column 'txt'. Its columns: text. Did you mean --text_column text?"),
    "no such dataset": ({"dataset_name": "/nowhere/at/all"}, "Cannot load the dataset"),
    "no tokenizer": ({"tokenizer_name": None}, "has no tokenizer"),
    "a tokenizer that is not there": ({"tokenizer_name": "/nowhere"}, "No tokenizer can be loaded"),
    "no model": ({"model_type": None, "config_overrides": None}, "No model is given"),
    "two models": ({"model_name_or_path": "x"}, "Several models are given"),
    "unknown architecture": ({"model_type": "lama"}, "Did you mean 'llama'"),
    "unknown field": ({"config_overrides": "hiden_size=8"}, "Unknown field 'hiden_size' of LlamaConfig. Did you mean"),
    "an architecture that is not causal": (
        {"model_type": "bert", "config_overrides": json.dumps(SIZES)}, "sees the token to predict",
    ),
    "rows longer than the scheme": (
        {"scheme": "learned", "scheme_options": '{"num_positions": 16}'}, "cannot read a row of 32 tokens",
    ),
    "packing and length": (
        {"scheme": "normalized_integer", "scheme_options": '{"direction": "random"}'}, "--packing concatenate",
    ),
    "skipping no data": ({"ignore_data_skip": "true"}, "--ignore_data_skip can only be False here"),
    "wandb": ({"report_to": "wandb"}, "requires wandb to be installed"),
    "bitsandbytes": ({"optim": "adamw_bnb_8bit"}, "bitsandbytes"),
    "modules for LoRA": ({"lora": "true", "lora_target_modules": "nothing"}, "--lora_target_modules nothing"),
    "masks of a causal model": ({"mlm_probability": 0.3}, "Train them with run_mlm.py"),
    "configuration of local text": ({"dataset_config_name": "en"}, "is for a dataset on the hub"),
    "streaming everything": ({"streaming": "true"}, "--max_train_samples"),
    "an output folder that is a file": ({"output_dir": __file__}, "is a file; a folder is expected"),
    "a config that is not there": (
        {"model_type": None, "config_overrides": None, "config_name": "/nowhere"}, "cannot build '/nowhere'",
    ),
    "sizes that do not fit": (
        {"config_overrides": "hidden_size=30,num_attention_heads=4"}, "not a multiple of the number of attention heads",
    ),
    "no rows in a batch": ({"per_device_train_batch_size": 0}, "--per_device_train_batch_size is 0"),
    "half precision on a CPU": ({"fp16": "true"}, "--fp16 has no effect on a CPU"),
    "evaluations that are not made": ({"eval_steps": 2}, "--eval_steps is given without --eval_strategy"),
    "an upload that is not made": ({"hub_strategy": "end"}, "--hub_strategy is given without --push_to_hub"),
    "other layers without layers": ({"scheme": "rope", "elsewhere": "none"}, "without --scheme_layers"),
    "a split of text files": ({"validation_split": "test"}, "has no split 'test': its only split is"),
    "the split that is trained on": ({"validation_split": "train"}, "are both 'train'"),
    "lines of a dataset": ({"sample_by": "line", "dataset_name": "a/b"}, "--sample_by line is for text files"),
    "LoRA without training": ({"lora": "true", "do_eval": "true"}, "--lora has no effect, because the run only"),
    "no steps": ({"max_steps": 0}, "trains nothing"),
    "best without evaluation": ({"load_best_model_at_end": "true"}, "strategy"),
    "a weight without self-distillation": ({"self_distill_weight": 0.5}, "without --self_distill"),
    "a weight that is nothing": ({"self_distill": "true", "self_distill_weight": 0}, "--self_distill_weight is 0"),
    "a weight without end": ({"self_distill": "true", "self_distill_weight": "inf"}, "--self_distill_weight is inf"),
    "positions of a shorter text": ({"pose_length": 32}, "--pose_length is 32, but a row already fills 32 positions"),
    "chunks without positions": ({"pose_chunks": 3}, "--pose_chunks is given without --pose_length"),
    "a single chunk": ({"pose_length": 64, "pose_chunks": 1}, "--pose_chunks"),
    "masked tokens further apart": ({"pose_length": 64, "causal": False}, "is for causal language models"),
    "a teacher elsewhere": ({"pose_length": 64, "self_distill": "true"}, "that the teacher of --distill"),
    "masked tokens seen twice": ({"self_distill": "true", "causal": False}, "is for causal language models"),
    "far without positions": (
        FAR | {"scheme": "none"}, "Changing position_ids has no effect in this LlamaForCausalLM: the scheme 'none'",
    ),
    "far for what reads no ids": (FAR | {"scheme": "cope"}, "the scheme 'cope' does not read them"),
    "far past a table": (
        FAR | {"scheme": "learned", "scheme_options": '{"num_positions": 64}'}, "it has 64 positions. Give at most 64",
    ),
    "far past a stock table": (
        FAR | {"model_type": "gpt2", "config_overrides": "n_embd=32,n_layer=1,n_head=2,n_positions=64"},
        "this GPT2LMHeadModel: it has 64 positions",
    ),
    "far without ids": (
        FAR | {"model_type": "bloom", "config_overrides": "hidden_size=32,n_layer=1,n_head=2"},
        "BloomForCausalLM takes no position_ids",
    ),
}  # fmt: skip


#: Swaps of a pretrained model, by default to T5's bias.
SWAPS: dict[str, tuple[dict[str, Any], str]] = {
    "the way is longer": ({"gradual_steps": 13}, "--gradual_steps is 13, but the training ends after 12 steps"),
    "best on the way": (
        {"gradual_steps": 4, "load_best_model_at_end": "true", "eval_strategy": "steps", "eval_steps": 5},
        "Set eval_delay=4",
    ),
    "gradual and LoRA": ({"gradual_steps": 4, "lora": "true"}, "Use only one of them"),
    "to nothing": ({"scheme": None, "initialization": "fitted"}, "--initialization is given without --scheme"),
    "fitted slopes": ({"scheme": "alibi", "initialization": "fitted"}, "option learnable"),
    "no teacher": (FROM_SCRATCH | {"distill": "true", "causal": False}, "--model_name_or_path"),
}


@pytest.mark.parametrize("case", [*REFUSED, *SWAPS])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_input_is_refused_before_anything_is_written(
    case: str, alibi: Path, texts: Path, tmp_path: Path, capsys: Any
) -> None:
    changes, message = (REFUSED | SWAPS)[case]
    if case in ("wandb", "bitsandbytes") and importlib.util.find_spec(case):
        pytest.skip(f"{case} is installed here")
    if case in SWAPS:
        changes = trained_on(alibi) | {"scheme": "t5"} | changes
    causal = changes.get("causal", True)
    assert run(words(texts, tmp_path / "out", **changes), causal) == 2
    said = capsys.readouterr().err
    assert ("run_clm: " if causal else "run_mlm: ") in said
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{"scheme": "kerpel"}, {"scheme": "kerple", "scheme_options": '{"slope": 1}'}])
def test_a_wrong_scheme_is_noticed_before_text_and_model(
    texts: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    """The default Llama has 6.7 billion parameters."""
    for function in ("load_rows", "build_model"):
        monkeypatch.setattr(f"training.run_clm.{function}", lambda *_: pytest.fail("too late"))
    assert "Unknown " in refused(capsys, run, words(texts, tmp_path / "out", **changes))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\x80\x81\x82", "UnicodeDecodeError"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "JSON parse error"),
        ("a.parquet", b"PAR1 and no more", "Parquet"),
        ("a.pdf", b"%PDF", "Known file types"),
        ("a.txt", b"", "holds 1 document"),
    ],
)
def test_a_file_that_is_no_text_is_named_with_the_reason(
    name: str, content: bytes, message: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    said = refused(capsys, run, words(tmp_path / name, tmp_path / "out"))
    assert name in said
    assert message in said


def test_a_value_that_an_option_cannot_take_is_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exited:
        run(words(texts, tmp_path / "out", packing="tight"))
    assert exited.value.code == 2
    assert not (tmp_path / "out").exists()


def test_a_run_with_other_settings_is_not_mixed_in(alibi: Path, texts: Path, capsys: Any, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in alibi.iterdir()}
    changed = words(texts, alibi, scheme="rope", learning_rate=1e-3, seed=3)
    said = refused(capsys, run, changed)
    assert "learning_rate was 0.01 and is now 0.001" in said
    assert "scheme was 'alibi' and is now 'rope'" in said
    assert "seed was 42 and is now 3" in said
    assert "logging" not in said
    other = write_texts(tmp_path / "texts", documents=9)
    assert "train_text was" in refused(capsys, run, words(other, alibi, scheme="alibi"))
    assert {path.name: path.stat().st_mtime_ns for path in alibi.iterdir()} == before


def test_a_folder_with_other_files_is_left_alone(texts: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "notes.md").write_text("mine")
    attempts: tuple[dict[str, Any], ...] = ({}, {"overwrite_output_dir": "true"})
    for more in attempts:
        assert "notes.md" in refused(capsys, run, words(texts, tmp_path, **more))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
