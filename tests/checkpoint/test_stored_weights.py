"""A scheme is compared with the header of its weights before any of its parts takes memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM
from transformers.trainer_utils import load_sharded_checkpoint

import hf_posenc
from hf_posenc import BuildContext, DistanceBias, SchemeConfig, SchemeParts
from hf_posenc.checkpoint import configuration
from hf_posenc.checkpoint.configuration import CheckpointError
from hf_posenc.schemes import registry
from hf_posenc.schemes.additive.learned import LearnedEncoding
from tests.checkpoint.checkpoint_cases import llama, outputs, randomize

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama with a learned table of 64 rows, in several files."""
    torch.manual_seed(0)
    model = randomize(hf_posenc.patch_model(llama(), "learned"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_table_that_the_weights_do_not_hold_is_never_allocated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    reset = LearnedEncoding.reset_parameters
    monkeypatch.setattr(
        LearnedEncoding, "reset_parameters", lambda part: (devices.append(part.weight.device.type), reset(part))
    )
    LlamaForCausalLM.from_pretrained(folder)
    # First without memory, to compare the shapes with those in the files.
    assert devices == ["meta", "cpu"]
    devices.clear()
    edit(folder / "config.json", lambda disk: disk["position_encoding"]["scheme"].update(num_positions=2**20))
    with pytest.raises(CheckpointError, match=r"'num_positions': 1048576.*\[1048576, 32\].*\.safetensors .*\[64, 32\]"):
        LlamaForCausalLM.from_pretrained(folder)
    assert devices == ["meta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("metadata"), "is not an index of weights"),
        (lambda index: index.update(weight_map=[1]), "is not an index of weights"),
        (
            lambda index: index["weight_map"].update({"lm_head.weight": "../x.safetensors"}),
            "is not an index of weights",
        ),
        (
            lambda index: index["weight_map"].update({"lm_head.weight": "x.safetensors"}),
            "'x.safetensors', which",
        ),
    ],
)
def test_a_damaged_index_is_explained(folder: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    edit(folder / INDEX, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        LlamaForCausalLM.from_pretrained(folder)
    assert str(folder / INDEX) in str(caught.value)


def test_a_damaged_shard_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=shard.name):
        LlamaForCausalLM.from_pretrained(folder)


def test_a_shard_of_another_save_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.manual_seed(1)
    other = randomize(hf_posenc.patch_model(llama(), "learned"))
    source = tmp_path_factory.mktemp("other")
    other.save_pretrained(source, max_shard_size="20KB")
    target = LlamaForCausalLM.from_pretrained(folder)
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    for shard in shards:
        written = (folder / shard).read_bytes()
        shutil.copy(source / shard, folder)
        for load in (LlamaForCausalLM.from_pretrained, lambda place: load_sharded_checkpoint(target, place)):
            with pytest.raises(CheckpointError, match=f"{shard} is not the file that the index"):
                load(folder)
        (folder / shard).write_bytes(written)
    # An index of another tool has no digests.
    edit(folder / INDEX, lambda index: index.update(metadata={"total_size": 1}))
    assert torch.equal(outputs(LlamaForCausalLM.from_pretrained(folder)), outputs(target.eval()))


def test_files_that_are_replaced_while_they_are_read_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    other, built = randomize(hf_posenc.patch_model(llama(), "learned")), configuration.follow_lengths

    def save_another(*arguments: Any) -> None:
        monkeypatch.undo()
        built(*arguments)
        other.save_pretrained(folder, max_shard_size="20KB")

    monkeypatch.setattr(configuration, "follow_lengths", save_another)
    with pytest.raises(CheckpointError, match="were replaced while the model was read"):
        LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(outputs(LlamaForCausalLM.from_pretrained(folder)), outputs(other))


def test_integers_in_place_of_position_weights_are_refused(folder: Path) -> None:
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    (name,) = [name for name in names if name.endswith("additive.weight")]
    weights = load_file(folder / names[name])
    weights[name] = weights[name].to(torch.int32)
    save_file(weights, folder / names[name], metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="is not the file that the index next to it was saved with"):
        LlamaForCausalLM.from_pretrained(folder)
    edit(folder / INDEX, lambda index: index["metadata"].pop("hf_posenc_shards"))
    with pytest.raises(CheckpointError, match="it is an integer tensor"):
        LlamaForCausalLM.from_pretrained(folder)


class CountedBias(DistanceBias):
    """Reads a number out of its parameter while it is built, which is impossible without memory."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(num_heads))
        self.first = self.slope[0].item()

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        return -distance.abs().float() * self.slope.view(-1, *(1 for _ in distance.shape))


def test_a_scheme_that_cannot_be_built_without_memory_still_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))

    @hf_posenc.register_scheme
    @dataclass(frozen=True)
    class CountedConfig(SchemeConfig):
        name: ClassVar[str] = "counted"

        def build(self, context: BuildContext) -> SchemeParts:
            return SchemeParts(logit_bias=CountedBias(context.num_heads))

    model = randomize(hf_posenc.patch_model(llama(), "counted"))
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(LlamaForCausalLM.from_pretrained(tmp_path)), outputs(model))
