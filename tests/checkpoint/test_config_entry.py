"""The entry of a config: unchanged for code that reads it in memory, unreadable for stock transformers on disk."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    BertConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    Qwen2MoeConfig,
    T5Config,
)

from hf_posenc import CheckpointError
from hf_posenc.entry import ATTRIBUTE, FORMAT, INSTALL, STORED_MODEL_TYPE, read_entry, read_fields
from hf_posenc.patching.place.config_entry import WEIGHTS_SENTENCE, attach_entry, detach_entry, without_sentence
from tests.checkpoint.checkpoint_cases import edit_json

ENTRY = {"scheme": "none"}
CONFIGS = [LlamaConfig, BertConfig, GPT2Config, T5Config, Qwen2MoeConfig, Gemma3Config]
by_kind = pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.model_type)


def with_entry(kind: Any = LlamaConfig, scheme: str = "none") -> Any:
    config = kind()
    attach_entry(config, {"scheme": scheme})
    return config


@by_kind
def test_an_entry_keeps_the_identity_of_the_config_and_is_removed_exactly(kind: Any) -> None:
    config = kind()
    before, fields, text = config.to_dict(), copy.deepcopy(config.__dict__), config.to_json_string()
    attach_entry(config, ENTRY)
    assert read_entry(config) == ENTRY
    assert config != kind()
    assert isinstance(config, kind)
    assert (type(config).__name__, type(config).__module__) == (kind.__name__, kind.__module__)
    assert without_sentence(config.to_dict()) == before | {ATTRIBUTE: {"format": FORMAT, "scheme": ENTRY}}
    assert config.model_type == kind.model_type
    assert kind.__name__ in repr(config)
    assert WEIGHTS_SENTENCE not in repr(config)
    attach_entry(config, {"scheme": "alibi"})
    assert read_entry(config) == {"scheme": "alibi"}
    assert config != with_entry(kind)
    detach_entry(config)
    assert (type(config), config.__dict__, config.to_json_string()) == (kind, fields, text)
    assert read_entry(config) is None


@by_kind
def test_copies_carry_the_entry(kind: Any) -> None:
    for duplicate in (copy.deepcopy, copy.copy, dataclasses.replace, lambda config: pickle.loads(pickle.dumps(config))):
        config = with_entry(kind)
        twin = duplicate(config)
        assert type(twin) is type(config)
        assert twin == config
        assert twin.to_json_string() == config.to_json_string()
        assert dataclasses.asdict(twin)[ATTRIBUTE] == read_fields(config)
        detach_entry(twin)
        assert read_entry(config) == ENTRY
        assert ATTRIBUTE not in {field.name for field in dataclasses.fields(twin)}


@by_kind
def test_the_disk_form_defeats_every_stock_reader_and_reads_back(kind: Any, tmp_path: Path) -> None:
    config = with_entry(kind)
    config.architectures = ["SomeModel"]
    disk = json.loads(config.to_json_string())
    assert disk["model_type"].startswith(f"hf_posenc ({INSTALL}")
    assert disk["architectures"] == ["hf_posenc.SomeModel"]
    assert INSTALL in disk["transformers_weights"]
    assert not disk["transformers_weights"].endswith((".safetensors", ".json"))
    assert disk[ATTRIBUTE]["base_model_type"] == config.model_type
    assert disk[ATTRIBUTE]["scheme"] == ENTRY
    assert "model_type" not in disk[ATTRIBUTE], "transformers would read the entry as a nested config"
    nested = [value for value in disk.values() if isinstance(value, dict) and "model_type" in value]
    assert all(part["transformers_weights"] == WEIGHTS_SENTENCE for part in nested)
    assert len(nested) == len(config.sub_configs)
    config.save_pretrained(tmp_path)
    for reader in (AutoConfig, kind):
        again = reader.from_pretrained(tmp_path)
        assert type(again) is type(config)
        assert read_entry(again) == ENTRY
        assert again.to_json_string() == config.to_json_string()
        assert not hasattr(again, "transformers_weights")
        detach_entry(again)
        assert type(again) is kind
        assert not any(hasattr(getattr(again, key), "transformers_weights") for key in again.sub_configs)


def test_override_arguments_are_honoured(tmp_path: Path) -> None:
    with_entry().save_pretrained(tmp_path)
    again, unused = AutoConfig.from_pretrained(
        tmp_path, return_unused_kwargs=True, num_labels=5, attn_implementation="eager", hidden_size=32, colour="blue"
    )
    assert (again.num_labels, again._attn_implementation, again.hidden_size) == (5, "eager", 32)
    assert unused == {"colour": "blue"}
    assert read_entry(again) == ENTRY


def test_a_config_rebuilt_from_its_dictionary_still_saves_the_entry() -> None:
    config = with_entry()
    for again in (LlamaConfig(**config.to_dict()), LlamaConfig.from_dict(config.to_dict())):
        assert json.loads(again.to_json_string())["model_type"] == STORED_MODEL_TYPE


def test_a_part_of_a_composite_checkpoint_is_refused(tmp_path: Path) -> None:
    config = with_entry(Gemma3Config)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="only a part of it"):
        type(config.text_config).from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("where", "damage", "message"),
    [
        ((), {ATTRIBUTE: None}, "edited or damaged"),
        ((), {ATTRIBUTE: {"scheme": "none"}}, "edited or damaged"),
        ((), {"architectures": "SomeModel"}, "a list of names of model classes"),
        ((ATTRIBUTE,), {"format": FORMAT + 1}, "Update hf_posenc"),
        *(
            ((ATTRIBUTE,), {"base_model_type": kind}, f"base_model_type {kind!r}")
            for kind in (None, "gpt2", "../x", "Llama")
        ),
        ((ATTRIBUTE,), {"scheme": "none"}, "names no scheme"),
        ((ATTRIBUTE,), {"scheme": {"scheme": "nonne"}}, r"Did you mean 'none'.*--import MODULE\. If a newer hf_posenc"),
        ((ATTRIBUTE,), {"scheme": {"scheme": "native"}}, "is never saved"),
        ((ATTRIBUTE,), {"scheme": {"scheme": "none", "theta": 3}}, "theta"),
        ((ATTRIBUTE,), {"native_lengths": [512]}, r"native_lengths \[512\] in its 'position_encoding' entry, where"),
        ((), {"model_type": None}, "model_type None"),
        ((), {"model_type": "x"}, "model type `x`"),
    ],
)
def test_a_damaged_entry_is_explained(
    tmp_path: Path, where: tuple[str, ...], damage: dict[str, Any], message: str
) -> None:
    config, path = with_entry(), tmp_path / "config.json"
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    forms = [path.read_text()]
    if where and "base_model_type" not in damage and damage != {"scheme": "none"}:
        forms += [json.dumps(config.to_dict())]  # written by hand
    readers = (AutoConfig,) if "x" in damage.values() else (AutoConfig, LlamaConfig)
    for form, reader in itertools.product(forms, readers):
        path.write_text(form)
        edit_json(path, *where, **damage)
        with pytest.raises(ValueError, match=message) as caught:
            reader.from_pretrained(tmp_path)
        assert str(tmp_path) in str(caught.value) or "x" in damage.values()


def test_a_list_in_place_of_a_config_is_explained(tmp_path: Path) -> None:
    with_entry().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(f"[{path.read_text()}]")
    for reader in (AutoConfig, LlamaConfig):
        with pytest.raises(CheckpointError, match=r"config\.json of .* a dictionary is expected, not a list"):
            reader.from_pretrained(tmp_path)


@pytest.mark.parametrize("model_type", ["hf_posenc", "hf_posenc (another text)"])
def test_only_the_first_word_of_the_model_type_counts(model_type: str, tmp_path: Path) -> None:
    with_entry().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", model_type=model_type)
    assert read_entry(AutoConfig.from_pretrained(tmp_path)) == ENTRY
