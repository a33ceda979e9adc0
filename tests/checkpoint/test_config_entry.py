"""The entry of a config: unchanged to everyone who looks it up in memory, unreadable to stock transformers on disk."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    BertConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    T5Config,
)

import hf_posenc  # noqa: F401
from hf_posenc.entry import ATTRIBUTE, FORMAT, STORED_MODEL_TYPE, read_entry, read_fields
from hf_posenc.patching.place.config_entry import WEIGHTS_SENTENCE, attach_entry, detach_entry, without_sentence

ENTRY = {"scheme": "none"}
CONFIGS = [LlamaConfig, BertConfig, GPT2Config, T5Config, Qwen2MoeConfig, Gemma3Config]


@pytest.fixture(params=CONFIGS, ids=lambda config_class: config_class.model_type)
def config(request: pytest.FixtureRequest) -> PreTrainedConfig:
    return request.param()


def test_attach_keeps_the_identity_of_the_config_in_memory(config: PreTrainedConfig) -> None:
    stock = type(config)
    before = config.to_dict()
    attach_entry(config, ENTRY)
    assert read_entry(config) == ENTRY
    assert isinstance(config, stock)
    assert (type(config).__name__, type(config).__module__) == (stock.__name__, stock.__module__)
    fields = {"position_encoding": {"format": FORMAT, "scheme": ENTRY}}
    assert without_sentence(config.to_dict()) == before | fields
    assert config.model_type == stock.model_type
    assert stock.__name__ in repr(config)
    assert WEIGHTS_SENTENCE not in repr(config)


def test_detach_restores_class_and_attributes_exactly(config: PreTrainedConfig) -> None:
    stock, before, text = type(config), copy.deepcopy(config.__dict__), config.to_json_string()
    attach_entry(config, ENTRY)
    attach_entry(config, {"scheme": "alibi"})
    assert read_entry(config) == {"scheme": "alibi"}
    detach_entry(config)
    assert type(config) is stock
    assert config.__dict__ == before
    assert config.to_json_string() == text
    assert read_entry(config) is None


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, dataclasses.replace, lambda config: pickle.loads(pickle.dumps(config))],
)
def test_copies_carry_the_entry(config: PreTrainedConfig, duplicate) -> None:
    attach_entry(config, copy.deepcopy(ENTRY))
    twin = duplicate(config)
    assert type(twin) is type(config)
    assert twin == config
    assert twin.to_json_string() == config.to_json_string()
    assert dataclasses.asdict(twin)[ATTRIBUTE] == read_fields(config)
    detach_entry(twin)
    assert read_entry(config) == ENTRY
    assert ATTRIBUTE not in {field.name for field in dataclasses.fields(twin)}


def test_equality_sees_the_entry() -> None:
    first, second = LlamaConfig(), LlamaConfig()
    attach_entry(first, {"scheme": "none"})
    assert first != second
    attach_entry(second, {"scheme": "alibi"})
    assert first != second
    attach_entry(second, {"scheme": "none"})
    assert first == second


def test_auto_mappings_find_the_class() -> None:
    config = LlamaConfig()
    attach_entry(config, ENTRY)
    assert MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ == "LlamaForCausalLM"


def test_auto_mappings_find_a_class_registered_by_a_third_party() -> None:
    class ThirdPartyConfig(PreTrainedConfig):
        model_type = "third_party_for_entry_test"

    class ThirdPartyModel:
        config_class = ThirdPartyConfig

    AutoConfig.register("third_party_for_entry_test", ThirdPartyConfig)
    AutoModel.register(ThirdPartyConfig, ThirdPartyModel)
    config = ThirdPartyConfig()
    attach_entry(config, ENTRY)
    assert AutoModel._model_mapping[type(config)] is ThirdPartyModel


def test_disk_form_defeats_every_stock_reader(config: PreTrainedConfig) -> None:
    config.architectures = ["SomeModel"]
    attach_entry(config, ENTRY)
    disk = json.loads(config.to_json_string())
    assert disk["model_type"].startswith("hf_posenc (install this package")
    assert disk["architectures"] == ["hf_posenc.SomeModel"]
    assert "pip install ." in disk["transformers_weights"]
    assert not disk["transformers_weights"].endswith((".safetensors", ".json"))
    assert disk["position_encoding"]["base_model_type"] == config.model_type
    assert disk["position_encoding"]["scheme"] == ENTRY
    assert "model_type" not in disk["position_encoding"], "transformers would read the entry as a nested config"
    nested = [value for value in disk.values() if isinstance(value, dict) and "model_type" in value]
    assert all(part["transformers_weights"] == WEIGHTS_SENTENCE for part in nested)
    assert len(nested) == len(config.sub_configs)


def test_save_and_read_back_gives_the_stock_class_with_the_entry(config: PreTrainedConfig, tmp_path) -> None:
    stock_class = type(config)
    attach_entry(config, ENTRY)
    config.save_pretrained(tmp_path)
    for reader in (AutoConfig, stock_class):
        again = reader.from_pretrained(tmp_path)
        assert type(again) is type(config)
        assert read_entry(again) == ENTRY
        assert again.to_json_string() == config.to_json_string()
        assert not hasattr(again, "transformers_weights")
        detach_entry(again)
        assert type(again) is stock_class
        assert not any(hasattr(getattr(again, key), "transformers_weights") for key in again.sub_configs)


def test_override_arguments_are_honoured(tmp_path) -> None:
    config = LlamaConfig()
    attach_entry(config, ENTRY)
    config.save_pretrained(tmp_path)
    again, unused = AutoConfig.from_pretrained(
        tmp_path, return_unused_kwargs=True, num_labels=5, attn_implementation="eager", hidden_size=32, colour="blue"
    )
    assert (again.num_labels, again._attn_implementation, again.hidden_size) == (5, "eager", 32)
    assert unused == {"colour": "blue"}
    assert read_entry(again) == ENTRY


def test_config_rebuilt_from_its_dictionary_still_saves_the_entry() -> None:
    config = LlamaConfig()
    attach_entry(config, ENTRY)
    for again in (LlamaConfig(**config.to_dict()), LlamaConfig.from_dict(config.to_dict())):
        assert json.loads(again.to_json_string())["model_type"] == STORED_MODEL_TYPE


def test_attribute_of_another_kind_is_not_overwritten() -> None:
    config = LlamaConfig(position_encoding="learned")
    assert read_entry(config) is None
    with pytest.raises(ValueError, match="already has an attribute"):
        attach_entry(config, ENTRY)


def test_a_part_of_a_composite_checkpoint_is_refused(tmp_path) -> None:
    config = Gemma3Config()
    attach_entry(config, ENTRY)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="only a part of it"):
        type(config.text_config).from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"position_encoding": None}, "edited or damaged"),
        ({"position_encoding": {"scheme": "none"}}, "edited or damaged"),
        ({"format": 99}, "Update hf_posenc"),
        ({"format": FORMAT + 1}, "Update hf_posenc"),
        ({"base_model_type": None}, "base_model_type None"),
        ({"scheme": "none"}, "names no scheme"),
        ({"scheme": {"scheme": "nonne"}}, "Did you mean 'none'"),
        ({"scheme": {"scheme": "none", "theta": 3}}, "theta"),
    ],
)
def test_damaged_entry_is_explained(tmp_path, damage: dict, message: str) -> None:
    config = LlamaConfig()
    attach_entry(config, ENTRY)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    disk = json.loads(path.read_text())
    if "position_encoding" in damage:
        disk |= damage
    else:
        disk["position_encoding"] |= damage
    path.write_text(json.dumps(disk))
    for reader in (AutoConfig, LlamaConfig):
        with pytest.raises(ValueError, match=message) as caught:
            reader.from_pretrained(tmp_path)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "ours"), [("hf_posenc", True), ("hf_posenc (another text)", True), ("x", False)]
)
def test_only_the_first_word_of_the_model_type_counts(model_type: str, ours: bool, tmp_path: Path) -> None:
    config = LlamaConfig()
    attach_entry(config, ENTRY)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}))
    if ours:
        assert read_entry(AutoConfig.from_pretrained(tmp_path)) == ENTRY
    else:
        with pytest.raises(ValueError, match="model type `x`"):
            AutoConfig.from_pretrained(tmp_path)
