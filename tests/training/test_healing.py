"""Studies of pretrained models: how they take another scheme, heal, resume, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    ByT5Tokenizer,
    DefaultFlowCallback,
    LlamaConfig,
    LlamaForCausalLM,
    set_seed,
)

from hf_posenc.recipes import GradualSwapCallback
from tests.training.run_cases import recorded_calls, refused, study_figures, study_runs, study_words
from training import compare
from training.study.corpus import load_corpus
from training.study.settings import StudySettings
from training.study.tasks.embedding import Teacher, Texts

pytestmark = pytest.mark.usefixtures("no_figures")

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    set_seed(0)
    # Drawn large enough for positions to matter.
    config = LlamaConfig(**SIZES, vocab_size=384, max_position_embeddings=64, rope_theta=500.0, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    set_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz,."
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder)
    config = BertConfig(**SIZES, vocab_size=len(words), max_position_embeddings=24)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def of_pretrained(model: Path, text: Path, folder: Path, schemes: dict[str, Any], **changes: Any) -> list[str]:
    options = {
        "model_name_or_path": model, "schemes": ",".join(schemes), "scheme_options": schemes, "train_length": 24,
        "test_lengths": "16,32", "eval_windows": 2, "max_steps": 4, "learning_rate": 1e-2, "warmup_steps": 0,
        "trainer": "{lr_scheduler_type: constant}", "checkpoint_every": 1,
        "hidden_size": None, "num_heads": None, "num_layers": None,
    }  # fmt: skip
    return study_words(text, folder, **(options | changes))


def interrupt(patch: pytest.MonkeyPatch, callback: type) -> None:
    """Every training stops before its third step."""
    begin = callback.on_step_begin  # type: ignore[attr-defined]

    def interrupted(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt
        begin(self, args, state, control, **kwargs)

    patch.setattr(callback, "on_step_begin", interrupted)


SCHEMES = {
    "control": {"scheme": "native"},
    "t5-fitted": {"scheme": "t5", "swap": {"initialization": "fitted"}},
    "alibi-gradual": {"scheme": "alibi", "swap": {"gradual_steps": 2}},
    "p_rope-distilled": {"scheme": "p_rope", "fraction": 0.5, "swap": {"initialization": "auto", "distill": True}},
    "none-lora": {"scheme": "none", "swap": {"lora": True}},
    "read": {"scheme": "none", "training": {"max_steps": 0}},
    "again": {"scheme": "alibi", "from": "read", "training": {"max_steps": 2}},
    "alibi-fitted": {"scheme": "alibi", "swap": {"initialization": "fitted"}},
}


@pytest.mark.long
def test_every_cell_starts_from_the_pretrained_model(llama, texts, tmp_path, capsys):
    words = of_pretrained(llama, texts, tmp_path / "out", SCHEMES)
    assert compare.main(words) == 0, capsys.readouterr().err
    runs = {run["scheme"]: run for run in study_runs(tmp_path / "out").values()}
    assert set(runs) == set(SCHEMES)
    fitted = runs.pop("alibi-fitted")
    assert fitted["status"] == "unsupported"
    assert "option learnable" in fitted["reason"]
    before = {name: run["before"]["loss"] for name, run in runs.items()}
    for name, run in runs.items():
        assert run["status"] == "finished"
        steps = {"read": [0], "again": [0, 2]}.get(name, [0, 2, 4])
        assert run["curve"]["step"] == steps
        # The untouched, the swapped and the trained model are measured on the same text.
        assert (run["by_length"]["loss"] == before[name]) == (name == "read")
    assert before["alibi-gradual"] == pytest.approx(before["control"], abs=1e-4)
    assert before["none-lora"] == before["read"] != before["control"]
    assert runs["t5-fitted"]["swap"]["fits"][0]["residual"] < 1
    # An omitted option is taken from the old scheme and reported.
    assert runs["p_rope-distilled"]["swap"]["options"] == {"theta": 500.0}
    assert runs["p_rope-distilled"]["config"]["theta"] == 500.0
    assert runs["none-lora"]["parameters"] < runs["control"]["parameters"]
    assert runs["p_rope-distilled"]["curve"]["validation_loss"] != runs["control"]["curve"]["validation_loss"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert all(f"| {name} [" in table for name in SCHEMES)
    assert "right after the swap, 32" in table
    assert "option learnable" in table
    assert not list((tmp_path / "out" / "trainings").rglob("checkpoint-*"))
    # Kept only because another training starts from it.
    assert [path.parent.name for path in (tmp_path / "out").rglob("*.safetensors")] == ["causal-read-seed0"]

    # The same command again takes what there is.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")}
    assert compare.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")} == stamps


@pytest.mark.long
def test_an_interrupted_cell_goes_on_where_it_was(llama, texts, tmp_path, monkeypatch):
    schemes = {"t5-gradual": {"scheme": "t5", "swap": {"gradual_steps": 3}}}
    whole, cut = (of_pretrained(llama, texts, tmp_path / name, schemes, eval_every=3) for name in ("whole", "cut"))
    assert compare.main(whole) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, GradualSwapCallback)
        assert compare.main(cut) == 130
    assert compare.main(cut) == 0
    assert study_figures(tmp_path / "cut") == study_figures(tmp_path / "whole")


def test_pretrained_weights_that_changed_are_noticed(llama, texts, tmp_path, capsys):
    model = LlamaForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    words = of_pretrained(tmp_path / "model", texts, tmp_path / "out", {"none": {}}, max_steps=0)
    assert compare.main(words) == 0
    model.lm_head.weight.data.zero_()
    model.save_pretrained(tmp_path / "model")
    capsys.readouterr()
    assert "model digest was" in refused(capsys, compare.main, words)


# Sentence encoders


def test_a_teacher_of_limited_length_reads_longer_text_in_pieces(bert, texts):
    tokenizer = BertTokenizer.from_pretrained(bert)
    study = StudySettings(dataset_name=str(texts), validation_fraction=0.25)
    pieces = Texts(load_corpus(study, tokenizer, 24, 24).train, tokenizer)
    model = BertModel.from_pretrained(bert, add_pooling_layer=False).eval()
    teacher = Teacher(model, pieces)
    short, long = pieces.row(5, 20)[None], pieces.row(5, 60)[None]
    assert short[0, 0] == tokenizer.cls_token_id
    assert long[0, -1] == tokenizer.sep_token_id
    with torch.no_grad():
        assert torch.equal(teacher.states(short), model(input_ids=short).last_hidden_state)
        states = teacher.states(long)
        second = model(input_ids=pieces.frame.around(long[:, 23:45], targets=False)).last_hidden_state
    assert states.shape == (1, 60, 32)
    assert torch.equal(states[:, 23:45], second[:, 1:-1])


@pytest.mark.long
def test_an_encoder_is_led_past_its_length(bert, texts, tmp_path, capsys):
    within = {"train_lengths": [16, 24]}
    schemes = {
        "control": {"scheme": "native", "training": within},
        "repeat": {"scheme": "learned", "num_positions": 64,
                   "swap": {"initialization": "fitted", "table_extension": "repeat"}},
        "alibi": {"swap": {"gradual_steps": 4}, "training": within},
        "too-long": {"scheme": "alibi", "swap": {"gradual_steps": 4}},
    }  # fmt: skip
    words = of_pretrained(
        bert, texts, tmp_path, schemes, tasks="embedding", test_lengths="16,24,64", train_lengths="16,64",
        max_steps=8, eval_every=4, batch_size=2, learning_rate=3e-3,
    )  # fmt: skip
    assert compare.main(words) == 0, capsys.readouterr().err
    control, repeat, alibi, too_long = study_runs(tmp_path).values()
    # While the old table acts, sequences cannot be longer than it.
    assert too_long["status"] == "unsupported"
    assert "24 positions of the learned table" in too_long["reason"]
    # The untouched encoder is its own teacher, and has no position 64.
    assert control["before"]["similarity"] == [1, 1, None]
    # The first rows are as they were.
    assert repeat["before"]["similarity"][:2] == [1, 1]
    assert repeat["before"]["similarity"][2] < 0.9999
    assert alibi["before"]["similarity"] == [1, 1, None]
    assert all(0 < value <= 1.0001 for run in (repeat, alibi) for value in run["by_length"]["similarity"])
    assert "cosine at 64" in (tmp_path / "table.md").read_text()


def test_an_encoder_is_trained_at_the_positions_of_longer_texts(bert, texts, tmp_path, monkeypatch, capsys):
    calls = recorded_calls(monkeypatch, BertModel)
    schemes = {"skipped": {"scheme": "rope", "training": {"pose_length": 64}}, "rope": {}}
    words = of_pretrained(bert, texts, tmp_path, schemes, tasks="embedding", test_lengths="16", max_steps=3)
    assert compare.main(words) == 0, capsys.readouterr().err
    skipped, plain = study_runs(tmp_path).values()
    seen = [(positions, mask) for training, positions, mask in calls if training]
    assert [positions is None for positions, _ in seen] == [False] * 3 + [True] * 3
    for positions, mask in seen[:3]:
        assert mask is not None, "transformers would take every skip for another document"
        assert (positions[:, 0] == 0).all()
        assert (positions.diff(dim=-1) > 1).sum() <= len(positions)
        assert int(positions.max()) < 64
    assert max(int(positions.max()) for positions, _ in seen[:3]) > 24
    assert skipped["curve"]["train_loss"] != plain["curve"]["train_loss"]
    schemes["skipped"]["training"]["pose_length"] = 24
    capsys.readouterr()
    assert compare.main(of_pretrained(bert, texts, tmp_path, schemes, tasks="embedding", test_lengths="16")) == 2
    assert "pose_length is 24, but no text could skip positions" in capsys.readouterr().err


def test_a_table_that_ends_before_pose_length_is_not_trained(bert, texts, tmp_path, capsys):
    """Whatever is drawn: the last position may come late, or never."""
    schemes = {"short": {"scheme": "learned", "num_positions": 63, "training": {"pose_length": 64}}}
    compare.main(of_pretrained(bert, texts, tmp_path, schemes, tasks="embedding", test_lengths="16", max_steps=1))
    assert "A sequence of length 64 is longer than the 63 positions" in capsys.readouterr().err
    schemes = {"stock": {"scheme": "native", "training": {"pose_length": 640}}}
    words = of_pretrained(bert, texts, tmp_path / "stock", schemes, tasks="embedding", test_lengths="16")
    compare.main([*words, "--max_steps=1"])
    assert "has 24 positions, but 640 are trained" in capsys.readouterr().err


def test_an_interrupted_encoder_goes_on_with_the_same_settings_only(bert, texts, tmp_path, monkeypatch, capsys):
    words = of_pretrained(
        bert, texts, tmp_path, {"control": {"scheme": "native"}}, tasks="embedding", test_lengths="16",
        max_steps=3, eval_every=3,
    )  # fmt: skip

    with monkeypatch.context() as patch:
        interrupt(patch, DefaultFlowCallback)
        assert compare.main(words) == 130
    capsys.readouterr()
    assert "learning_rate was 0.01 and is now 0.5" in refused(capsys, compare.main, [*words, "--learning_rate=0.5"])
    # A checkpoint that was cut off is passed over.
    (tmp_path / "trainings" / "embedding-control-seed0" / "checkpoint-2" / "optimizer.pt").write_bytes(b"PK")
    assert compare.main(words) == 0
    (run,) = study_runs(tmp_path).values()
    assert run["curve"]["step"] == [0, 3]
