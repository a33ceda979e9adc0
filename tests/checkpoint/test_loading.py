"""The routes into `from_pretrained`, and the errors for checkpoints that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
)
from transformers.trainer_utils import load_sharded_checkpoint

import hf_posenc
from hf_posenc import BuildContext, CheckpointError, DistanceBias, SchemeConfig, SchemeParts, UnsupportedError
from hf_posenc.checkpoint import configuration, loading
from hf_posenc.checkpoint.install import install
from hf_posenc.schemes import registry
from hf_posenc.schemes.additive.learned import LearnedConfig
from tests.checkpoint.checkpoint_cases import (
    ABSENT,
    assert_same,
    bert,
    edit_json,
    edit_weights,
    gpt2,
    llama,
    made,
    outputs,
)
from tests.models import tiny_config

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return made("t5")


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this model. No test changes it."""
    folder = tmp_path_factory.mktemp("models") / "model"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A Llama with a learned table of 64 rows, in several files."""
    made("learned").save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


class TestRoutes:
    def test_the_base_class_and_other_heads_keep_the_scheme_and_take_options(self, model: Any, folder: Path) -> None:
        for base_class in (AutoModel, LlamaModel):
            base, info = base_class.from_pretrained(folder, output_loading_info=True)
            assert type(base) is LlamaModel
            assert not info["missing_keys"]
            assert_same(base, model.model)
        for head_class in (AutoModelForSequenceClassification, LlamaForSequenceClassification):
            classifier = head_class.from_pretrained(folder, num_labels=3, attn_implementation="eager")
            assert type(classifier) is LlamaForSequenceClassification
            assert (classifier.config.num_labels, classifier.config._attn_implementation) == (3, "eager")
            assert_same(classifier.model, model.model, 1e-5)

    def test_a_base_model_that_is_saved_alone_loads_into_a_head_model(self, model: Any, tmp_path: Path) -> None:
        model.model.save_pretrained(tmp_path)
        head, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert info["missing_keys"] == {"lm_head.weight"}
        assert_same(head.model, model.model)

    def test_a_config_and_a_state_dict_can_be_passed(self, model: Any, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        before = config.to_json_string()
        assert_same(LlamaForCausalLM.from_pretrained(folder, config=config), model)
        assert config.to_json_string() == before
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert_same(LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=state), model)

    def test_hub_ids_load_with_revision_and_subfolder(
        self, model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        revision = "0123456789abcdef0123456789abcdef01234567"
        repository = tmp_path / "cache" / "models--someone--some-model"
        shutil.copytree(folder, repository / "snapshots" / revision)
        shutil.copytree(folder, repository / "snapshots" / revision / "below")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(revision)
        hub = {"cache_dir": tmp_path / "cache", "local_files_only": True}
        for model_class in (AutoModelForCausalLM, LlamaForCausalLM):
            for options in ({}, {"revision": "main"}, {"revision": revision}, {"subfolder": "below"}):
                assert_same(model_class.from_pretrained("someone/some-model", **hub, **options), model)
        (repository / "refs" / "main").write_text("f" * 40)
        for source, options in (
            ("someone/some-model", hub | {"revision": revision}), (folder.parent, {"subfolder": folder.name})
        ):  # fmt: skip
            with pytest.raises(UnsupportedError, match="does not contain it"):
                LlamaForCausalLM.from_pretrained(source, config=LlamaConfig(), **options)

    def test_what_the_cache_does_not_tell_is_found_while_loading(
        self, model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loading, "is_patched", lambda source, kwargs: False)
        assert_same(LlamaForCausalLM.from_pretrained(folder), model)

    def test_stock_checkpoints_take_the_stock_path(self, stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(*args: Any) -> None:
            raise AssertionError("a stock checkpoint reached the patching path")

        monkeypatch.setattr(loading, "patching_proxy", forbidden)
        monkeypatch.setattr("hf_posenc.checkpoint.agreement.check_loaded", forbidden)
        monkeypatch.setattr("hf_posenc.patching.place.config_entry.attach_entry", forbidden)
        for model_class in (AutoModelForCausalLM, LlamaForCausalLM):
            for options in ({}, {"config": LlamaConfig.from_pretrained(stock)}, {"device_map": "cpu"}):
                loaded = model_class.from_pretrained(stock, **options)
                assert (type(loaded), type(loaded.config)) == (LlamaForCausalLM, LlamaConfig)
                assert_same(loaded, made())
        assert type(AutoModelForCausalLM.from_config(loaded.config).config) is LlamaConfig

    def test_installing_twice_changes_nothing(self) -> None:
        before = {name: PreTrainedModel.__dict__[name] for name in ("from_pretrained", "_from_config", "__init__")}
        install()
        assert {name: PreTrainedModel.__dict__[name] for name in before} == before


class TestAfterwards:
    @pytest.mark.parametrize(("build", "scheme"), [(llama, "t5"), (gpt2, "rope"), (bert, "alibi")])
    def test_unpatching_a_reloaded_model_gives_the_stock_one(self, tmp_path: Path, build: Any, scheme: str) -> None:
        stock = made(build=build)
        expected, keys, text = outputs(stock), list(stock.state_dict()), stock.config.to_diff_dict()
        hf_posenc.patch_model(stock, scheme).save_pretrained(tmp_path / "patched")
        loaded = type(stock).from_pretrained(tmp_path / "patched")
        assert not torch.equal(outputs(loaded), expected)
        assert_same(hf_posenc.unpatch_model(loaded), expected)
        assert list(loaded.state_dict()) == keys
        assert type(loaded.config) is type(loaded).config_class
        ignored = dict.fromkeys(("architectures", "dtype", "_name_or_path"))
        assert loaded.config.to_diff_dict() | ignored == text | ignored
        loaded.save_pretrained(tmp_path / "stock")
        assert json.loads((tmp_path / "stock" / "config.json").read_text())["model_type"] == loaded.config.model_type

    def test_native_weights_are_frozen_again_until_the_patch_is_undone(self, tmp_path: Path) -> None:
        made("alibi", build=bert).save_pretrained(tmp_path)
        for options in ({}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}):
            loaded = BertForMaskedLM.from_pretrained(tmp_path, **options)
            frozen = [name for name, parameter in loaded.named_parameters() if not parameter.requires_grad]
            assert frozen == ["bert.embeddings.position_embeddings.weight"]
            hf_posenc.unpatch_model(loaded)
            assert all(parameter.requires_grad for parameter in loaded.parameters())

    def test_generation_without_a_cache_stays_and_ends_with_the_patch(self, tmp_path: Path) -> None:
        scheme = hf_posenc.RopeConfig(scaling=hf_posenc.DynamicScaling(2.0, 64))
        with pytest.warns(UserWarning, match="use_cache=False"):
            hf_posenc.patch_model(llama(), scheme).save_pretrained(tmp_path)
        with pytest.warns(UserWarning, match="use_cache=False"):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.generation_config.use_cache is False
        hf_posenc.unpatch_model(loaded)
        assert loaded.generation_config.use_cache is True


class TestRefusals:
    def test_a_class_and_a_config_that_do_not_belong_together(self, model: Any, folder: Path) -> None:
        for model_class in (LlamaForCausalLM, LlamaModel):
            with pytest.raises(UnsupportedError, match=r"from_config\(config\)"):
                model_class(model.config)
        with pytest.raises(UnsupportedError, match="from_config"):
            LlamaForCausalLM(LlamaConfig(**model.config.to_dict()))
        for model_class in (LlamaForCausalLM, AutoModelForCausalLM):
            with pytest.raises(UnsupportedError, match="does not contain it"):
                model_class.from_pretrained(folder, config=LlamaConfig())

    def test_a_stock_model_with_the_config_of_a_patched_one_is_not_saved(self, tmp_path: Path) -> None:
        config = tiny_config("LlamaForCausalLM")
        patched, stock = LlamaForCausalLM(config), LlamaForCausalLM(config)
        hf_posenc.patch_model(patched, "alibi")
        stock.config = patched.config
        with pytest.raises(UnsupportedError, match="config of a patched model"):
            stock.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())
        patched.save_pretrained(tmp_path / "patched")
        hf_posenc.unpatch_model(patched)
        stock.save_pretrained(tmp_path / "stock")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda tensor: None, "random weights"),
            (lambda tensor: tensor[:3], r"of the shape \[32, 4\], but in model.safetensors it has the shape \[3, 4\]"),
            (lambda tensor: tensor.to(torch.int32), "it is an integer tensor"),
        ],
    )
    def test_position_weights_that_are_missing_or_of_another_kind(
        self, copied: Path, change: Callable[[Any], Any], message: str
    ) -> None:
        edit_weights(
            copied / "model.safetensors",
            lambda name, tensor: change(tensor) if "position_encoding.stacks" in name else tensor,
        )
        for model_class in (AutoModelForCausalLM, LlamaForCausalLM, AutoModel):
            with pytest.raises(CheckpointError, match=message):
                model_class.from_pretrained(copied, ignore_mismatched_sizes=True)

    def test_a_scheme_that_does_not_fit_the_model(self, copied: Path) -> None:
        edit_json(copied / "config.json", "position_encoding", scheme={"scheme": "rope", "rotary_dim": 4096})
        with pytest.raises(CheckpointError, match="4096"):
            AutoModelForCausalLM.from_pretrained(copied)

    def test_broken_stock_checkpoints_get_the_stock_errors(self, tmp_path: Path) -> None:
        llama().save_pretrained(tmp_path)
        with pytest.raises(OSError, match="no file named"):
            LlamaForCausalLM.from_pretrained(tmp_path, config=LlamaConfig(), subfolder="nowhere")
        (tmp_path / "config.json").write_text('{"model_type": "hf_posenc"')
        with pytest.raises(OSError, match="not a valid JSON file"):
            LlamaForCausalLM.from_pretrained(tmp_path)


class TestHeaders:
    """A scheme is compared with the header of its weights before any of its parts takes memory."""

    def test_a_table_that_the_weights_do_not_hold_is_never_allocated(
        self, shards: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        devices = []
        build = LearnedConfig.build

        def noted(*given: Any) -> Any:
            devices.append((parts := build(*given)).additive.weight.device.type)
            return parts

        monkeypatch.setattr(LearnedConfig, "build", noted)
        LlamaForCausalLM.from_pretrained(shards)
        # First without memory, to compare the shapes with those in the files.
        assert devices == ["meta", "cpu"]
        devices.clear()
        edit_json(shards / "config.json", "position_encoding", "scheme", num_positions=2**20)
        with pytest.raises(
            CheckpointError, match=r"'num_positions': 1048576.*\[1048576, 32\].*\.safetensors .*\[64, 32\]"
        ):
            LlamaForCausalLM.from_pretrained(shards)
        assert devices == ["meta"]

    @pytest.mark.parametrize(
        ("where", "change", "message"),
        [
            ((), {"metadata": ABSENT}, "no index of weights, where"),
            ((), {"weight_map": [1]}, "no index of weights, where"),
            (("weight_map",), {"lm_head.weight": "../x.safetensors"}, "no index of weights, where"),
            (("weight_map",), {"lm_head.weight": "x.safetensors"}, "'x.safetensors', which"),
        ],
    )
    def test_a_damaged_index_is_explained(
        self, shards: Path, where: tuple[str, ...], change: dict[str, Any], message: str
    ) -> None:
        edit_json(shards / INDEX, *where, **change)
        with pytest.raises(CheckpointError, match=message) as caught:
            LlamaForCausalLM.from_pretrained(shards)
        assert all(str(part) in str(caught.value) for part in (shards, INDEX))

    def test_a_shard_that_is_damaged_or_of_another_save_is_refused(self, shards: Path, tmp_path: Path) -> None:
        made("learned", seed=1).save_pretrained(tmp_path / "other", max_shard_size="20KB")
        target = LlamaForCausalLM.from_pretrained(shards)
        for shard in sorted(path.name for path in shards.glob("model-*.safetensors")):
            data = (shards / shard).read_bytes()
            (shards / shard).write_bytes(data[:-1])
            with pytest.raises(CheckpointError, match=shard):
                LlamaForCausalLM.from_pretrained(shards)
            shutil.copy(tmp_path / "other" / shard, shards)
            for load in (LlamaForCausalLM.from_pretrained, lambda place: load_sharded_checkpoint(target, place)):
                with pytest.raises(CheckpointError, match=f"{shard} is not the file that the index"):
                    load(shards)
            (shards / shard).write_bytes(data)
        # An index of another tool has no digests.
        edit_json(shards / INDEX, metadata={"total_size": 1})
        assert_same(LlamaForCausalLM.from_pretrained(shards), target)

    def test_files_that_are_replaced_while_they_are_read_are_refused(
        self, shards: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other, built = made("learned", seed=1), configuration.follow_lengths

        def save_another(*arguments: Any) -> None:
            monkeypatch.undo()
            built(*arguments)
            other.save_pretrained(shards, max_shard_size="20KB")

        monkeypatch.setattr(configuration, "follow_lengths", save_another)
        with pytest.raises(CheckpointError, match="were replaced while the model was read"):
            LlamaForCausalLM.from_pretrained(shards)
        assert_same(LlamaForCausalLM.from_pretrained(shards), other)

    def test_a_scheme_that_cannot_be_built_without_memory_still_loads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))

        @hf_posenc.register_scheme
        @dataclass(frozen=True)
        class CountedConfig(SchemeConfig):
            name: ClassVar[str] = "counted"

            def build(self, context: BuildContext) -> SchemeParts:
                return SchemeParts(logit_bias=CountedBias(context.num_heads))

        model = made("counted")
        model.save_pretrained(tmp_path)
        assert_same(LlamaForCausalLM.from_pretrained(tmp_path), model)
        assert any("slope" in name for name in load_file(tmp_path / "model.safetensors"))


class CountedBias(DistanceBias):
    """Reads a number out of its parameter while it is built, which is impossible without memory."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(num_heads))
        self.first = self.slope[0].item()

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        return -distance.abs().float() * self.slope.view(-1, *(1 for _ in distance.shape))
