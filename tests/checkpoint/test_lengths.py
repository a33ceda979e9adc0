"""A length that was set by `extend_context` goes with the scheme: into folders, exports, names, adapters."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, LlamaForCausalLM

from hf_posenc import (
    CheckpointError,
    DynamicScaling,
    LinearScaling,
    NtkScaling,
    RopeConfig,
    YarnScaling,
    export_model,
    extend_context,
    load_position_adapter,
    patch_model,
    save_position_adapter,
    unpatch_model,
)
from hf_posenc.checkpoint import model_card
from tests.checkpoint.checkpoint_cases import (
    ABSENT,
    LONG,
    adapted,
    as_format_1,
    assert_same,
    base,
    bert,
    edit_json,
    llama,
    made,
    outputs,
    randomize,
    refused,
    roberta,
    token_ids,
)
from tests.cli.conftest import save_tokenizer
from tests.models import tiny

#: Of a Llama and of a BERT.
NATIVE, MASKED = 64, 48


def stated(model: Any) -> set[int]:
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return {inner.config.max_position_embeddings, inner.position_encoding.lengths.current}


def extended(stock: Path, scheme: str = "t5") -> Any:
    return extend_context(base(stock, scheme), length=LONG)


class TestFolders:
    def test_a_saved_stock_model_is_the_same_after_a_length_has_come_and_gone(self, tmp_path: Path) -> None:
        model = made(build=bert)
        model.save_pretrained(tmp_path / "stock")
        extend_context(patch_model(model, "alibi"), length=LONG).save_pretrained(tmp_path / "patched")
        unpatch_model(model).save_pretrained(tmp_path / "undone")
        unpatch_model(AutoModelForMaskedLM.from_pretrained(tmp_path / "patched")).save_pretrained(tmp_path / "again")
        for name, file in (("undone", "config.json"), ("undone", "model.safetensors"), ("again", "config.json")):
            assert (tmp_path / "stock" / file).read_bytes() == (tmp_path / name / file).read_bytes()

    def test_a_length_that_was_edited_by_hand_is_followed_where_the_scheme_reaches_it(self, tmp_path: Path) -> None:
        made("alibi", build=bert).save_pretrained(tmp_path)
        edit_json(tmp_path / "config.json", max_position_embeddings=300)
        model = AutoModelForMaskedLM.from_pretrained(tmp_path)
        assert stated(model) == {300}
        assert model.bert.embeddings.position_embeddings.weight.shape[0] == MASKED
        assert outputs(model, token_ids(300)).shape[1] == 300
        assert stated(AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tmp_path))) == {300}
        # The length of a checkpoint without native ones is native.
        edit_json(tmp_path / "config.json", "position_encoding", native_lengths=ABSENT)
        edit_json(tmp_path / "config.json", max_position_embeddings=MASKED)
        assert stated(AutoModelForMaskedLM.from_pretrained(tmp_path)) == {MASKED}

    def test_a_length_that_was_edited_past_the_scheme_names_extend_context(self, tmp_path: Path) -> None:
        made("learned", build=bert, num_positions=100).save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 100
        edit_json(tmp_path / "config.json", max_position_embeddings=101)
        with pytest.raises(CheckpointError, match=r"101.*100 positions.*Restore.*48.*extend_context"):
            AutoModelForMaskedLM.from_pretrained(tmp_path)

    def test_damaged_lengths_are_refused_by_name(self, tmp_path: Path) -> None:
        made("alibi", build=bert).save_pretrained(tmp_path)
        config, name = tmp_path / "config.json", "max_position_embeddings"
        sound = config.read_text()
        wrong = (512, {name: "64"}, {name: 0}, {name: True}, {name: 2**31}, {"hidden_size": 64}, {f"text.{name}": 64})
        edits: list[Any] = [(("position_encoding",), {"native_lengths": native}) for native in wrong]
        for where, changes in [*edits, ((), {name: "many"}), ((), {name: None})]:
            config.write_text(sound)
            edit_json(config, *where, **changes)
            with pytest.raises(CheckpointError, match="native_lengths"):
                AutoModelForMaskedLM.from_pretrained(tmp_path)

    def test_a_card_says_the_length(self) -> None:
        model = extend_context(made("alibi", build=bert), length=LONG)
        assert f"Context: {LONG} tokens, {MASKED} natively" in str(model_card(model, model_id="me/bert-alibi"))


@pytest.mark.parametrize("kind", ["SentenceTransformer", "CrossEncoder"])
def test_sentence_transformers_reads_whole_texts_and_has_the_length_again(kind: str, tmp_path: Path) -> None:
    load = getattr(pytest.importorskip("sentence_transformers"), kind)
    tiny("BertForSequenceClassification", max_position_embeddings=MASKED, num_labels=1).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path, model_max_length=MASKED).save_pretrained(tmp_path)
    encoder, words = load(str(tmp_path), device="cpu"), ["the dog"] * 60 + ["cat"]
    randomize(encoder[0].model)
    extend_context(patch_model(encoder[0].model, "alibi"), encoder.tokenizer, length=LONG)
    encoder.save_pretrained(str(tmp_path / "saved"))

    def read(model: Any, words: list[str]) -> Any:
        assert model.max_seq_length == LONG
        return (
            model.encode(" ".join(words)) if kind == "SentenceTransformer" else model.predict(("cat", " ".join(words)))
        )

    assert abs(read(encoder, words) - read(encoder, words[:-1])).max() > 1e-4
    assert (read(load(str(tmp_path / "saved"), device="cpu"), words) == read(encoder, words)).all()


#: Schemes of a Llama, the length that is set, and that of the stock export.
EXPORTS: dict[str, tuple[Any, int | None, int]] = {
    "short yarn": (RopeConfig(scaling=YarnScaling(4.0, NATIVE // 4)), None, NATIVE),
    "linear": (RopeConfig(scaling=LinearScaling(2.0)), None, 2 * NATIVE),
    "ntk": (RopeConfig(scaling=NtkScaling(2.0)), None, 2 * NATIVE),
    "yarn": (RopeConfig(theta=500.0, scaling=YarnScaling(4.0, NATIVE)), None, 4 * NATIVE),
    "yarn, length": (RopeConfig(scaling=YarnScaling(4.0, NATIVE)), 100, 100),
    "native": ("native", None, NATIVE),
    # A stock dynamic scaling starts where its config says that the model ends.
    "dynamic": (RopeConfig(scaling=DynamicScaling(2.0, NATIVE)), 256, NATIVE),
}


class TestExports:
    """That other processes compute the same numbers with them is in tests/export/test_stock.py."""

    def test_a_stock_export_states_the_length(self, tmp_path: Path) -> None:
        for name, (scheme, length, expected) in EXPORTS.items():
            model = made(scheme, build=llama)
            if length is not None:
                extend_context(model, length=length)
            export_model(model, tmp_path / name)
            stock = AutoModelForCausalLM.from_pretrained(tmp_path / name)
            assert isinstance(stock, LlamaForCausalLM)
            assert stock.config.max_position_embeddings == expected, name
            assert not hasattr(stock, "position_encoding")

    @pytest.mark.parametrize("length", [None, 100])
    def test_an_exported_table_keeps_its_rows_whatever_the_length(self, tmp_path: Path, length: int | None) -> None:
        model = made("learned", build=roberta, num_positions=200)
        assert model.config.max_position_embeddings == 202
        if length is not None:
            extend_context(model, length=length)
        export_model(model, tmp_path)
        stock = AutoModelForMaskedLM.from_pretrained(tmp_path)
        rows = stock.roberta.embeddings.position_embeddings.weight.shape[0]
        assert stock.config.max_position_embeddings == rows == 202


class TestNames:
    def test_a_rebuilt_model_has_the_length(self, stock: Path) -> None:
        model = extended(stock)
        again = AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
        third = AutoModelForCausalLM.from_pretrained(again.name_or_path)
        assert stated(again) == stated(third) == {LONG}
        assert AutoModelForCausalLM.from_pretrained(str(again.name_or_path)).config.max_position_embeddings < LONG
        name = pickle.loads(pickle.dumps(extended(stock, "alibi").config._name_or_path))
        assert stated(AutoModelForCausalLM.from_pretrained(name)) == {LONG}
        never = base(stock, "alibi")
        assert stated(AutoModelForCausalLM.from_pretrained(never.name_or_path)) == stated(never) != {LONG}

    def test_one_that_was_loaded_from_a_patched_folder(self, stock: Path, tmp_path: Path) -> None:
        """The folder holds the scheme and its parameters, and states the length from before."""
        base(stock, "t5").save_pretrained(tmp_path)
        model = extend_context(AutoModelForCausalLM.from_pretrained(tmp_path), length=LONG)
        weight = next(model.position_encoding.parameters())
        expected = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()
        again = AutoModelForCausalLM.from_pretrained(model.name_or_path)
        assert stated(again) == {LONG}
        assert torch.equal(next(again.position_encoding.parameters()), expected), "parameters go with the other weights"
        assert type(unpatch_model(model).config._name_or_path) is not str, "the files are those of a patched model"


class TestAdapters:
    def test_a_position_adapter(self, stock: Path, tmp_path: Path) -> None:
        save_position_adapter(extended(stock), tmp_path)
        model = load_position_adapter(base(stock), tmp_path)
        assert stated(model) == stated(AutoModelForCausalLM.from_pretrained(model.name_or_path)) == {LONG}
        assert unpatch_model(model).config.max_position_embeddings == NATIVE
        # A length that was chosen for the base stays.
        save_position_adapter(extended(stock, "alibi"), tmp_path)
        assert stated(load_position_adapter(base(stock, "alibi"), tmp_path)) == {LONG}
        chosen = extend_context(base(stock, "alibi"), length=300)
        assert stated(load_position_adapter(chosen, tmp_path)) == {300}
        # A file of an older version has none.
        edit_json(as_format_1(tmp_path), length=ABSENT)
        assert stated(load_position_adapter(base(stock), tmp_path)) == stated(base(stock, "alibi"))

    def test_a_peft_adapter(self, stock: Path, tmp_path: Path) -> None:
        adapted(extended(stock)).save_pretrained(tmp_path)
        assert stated(AutoPeftModelForCausalLM.from_pretrained(tmp_path)) == {LONG}
        assert stated(PeftModel.from_pretrained(base(stock), tmp_path)) == {LONG}
        assert stated(AutoModelForCausalLM.from_pretrained(tmp_path)) == {LONG}

    @pytest.mark.parametrize("kind", ["position adapter", "PEFT adapter"])
    def test_a_load_that_fails_leaves_scheme_parameters_and_length(
        self, stock: Path, tmp_path: Path, kind: str
    ) -> None:
        if kind == "PEFT adapter":
            adapted(extended(stock)).save_pretrained(tmp_path)
            (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
            as_format_1(tmp_path)
        else:
            save_position_adapter(extended(stock), tmp_path, adapter=str(tmp_path / "absent"))
        model = patch_model(base(stock), "t5")
        lengths = stated(model)
        # PEFT leaves its layers in a model whose adapter it could not load.
        kept = model.position_encoding if kind == "PEFT adapter" else model
        with refused("", kept, error=(OSError, ValueError, SafetensorError)):
            load_position_adapter(model, tmp_path)
        assert stated(model) == lengths != {LONG}


def test_a_length_outlives_a_scheme_that_reaches_less(stock: Path) -> None:
    model = extended(stock, "alibi")
    for scheme, options, expected in (
        ("learned", {"num_positions": 512}, 512), ("binary", {"bits": 7}, 128), ("alibi", {}, LONG),
        ("learned", {"num_positions": 512}, 512),
    ):  # fmt: skip
        patch_model(model, scheme, **options)
        assert stated(model) == {expected}
    extend_context(model, length=200)
    assert stated(patch_model(model, "alibi")) == {200}
    assert_same(unpatch_model(model), base(stock))
    assert stated(patch_model(model, "alibi")) == stated(base(stock, "alibi"))
