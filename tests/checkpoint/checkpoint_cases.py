"""Save, change, load, compare: tiny random models, their folders, and their comparison."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
    RobertaForMaskedLM,
    T5ForConditionalGeneration,
)

import hf_posenc
from hf_posenc import CheckpointError
from hf_posenc.entry import find_mark
from tests.fresh import printed, run_fresh
from tests.models import tiny, word_tokenizer

VOCABULARY = 64
LENGTH = 14
LONG = 1024
#: Stands for a key that is removed.
ABSENT = object()


def llama(**options: Any) -> LlamaForCausalLM:
    return tiny("LlamaForCausalLM", vocab_size=VOCABULARY, **options)


def gpt2() -> GPT2LMHeadModel:
    return tiny("GPT2LMHeadModel", vocab_size=VOCABULARY, n_positions=48, bos_token_id=0, eos_token_id=0)


def bert(**options: Any) -> BertForMaskedLM:
    return tiny("BertForMaskedLM", vocab_size=VOCABULARY, max_position_embeddings=48, **options)


def roberta() -> RobertaForMaskedLM:
    return tiny("RobertaForMaskedLM", vocab_size=VOCABULARY, max_position_embeddings=50)


def t5(**options: Any) -> T5ForConditionalGeneration:
    return tiny("T5ForConditionalGeneration", vocab_size=VOCABULARY, **options)


def t5_published() -> T5ForConditionalGeneration:
    """With the length that the config of a published T5 states, although its own class has none."""
    return t5(n_positions=512)


def bart() -> PreTrainedModel:
    return tiny("BartForConditionalGeneration", vocab_size=VOCABULARY)


def qwen2_moe() -> Qwen2MoeForCausalLM:
    return tiny(
        "Qwen2MoeForCausalLM", vocab_size=VOCABULARY, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model of one family with one scheme.

    Args:
        every_route: whether it is saved in every form and loaded by every function.
        lengths: of a model that is extended to 1,024 tokens: in its config, in force, native; after `unpatch_model` in
            its config and for generation.
    """

    build: Callable[[], PreTrainedModel]
    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    every_route: bool = False
    lengths: list[int | None] | None = None

    @property
    def name(self) -> str:
        return f"{self.build.__name__}-{self.scheme}"

    def model(self) -> PreTrainedModel:
        """The patched model, with the length."""
        torch.manual_seed(0)
        model = self.build()
        if self.lengths is not None and getattr(model, "generation_config", None) is not None:
            model.generation_config.max_length = self.lengths[-1]
        hf_posenc.patch_model(model, self.scheme, **self.options)
        return randomize(model if self.lengths is None else hf_posenc.extend_context(model, length=LONG))


CASES = [
    Case(llama, "alibi", lengths=[LONG, LONG, 64, 64, 64]),
    Case(llama, "t5", every_route=True),
    Case(gpt2, "learned", {"num_positions": 80}, every_route=True),
    Case(gpt2, "alibi", lengths=[LONG, LONG, 48, 48, 48]),
    Case(bert, "alibi", lengths=[LONG, LONG, 48, 48, None]),
    Case(bert, "t5", every_route=True),
    Case(roberta, "learned", {"num_positions": 64}, every_route=True),
    Case(roberta, "alibi", lengths=[LONG + 2, LONG, 48, 50, None]),
    Case(bart, "alibi", lengths=[LONG, LONG, 64, 64, 64]),
    # There is nothing in the config of a T5 to save a length in.
    Case(t5, "alibi", every_route=True, lengths=[None] * 5),
    Case(t5_published, "alibi", lengths=[LONG, LONG, 512, 512, 512]),
    Case(qwen2_moe, "t5", every_route=True),
]


def randomize(model: Any) -> Any:
    """Gives every weight a distinct, clearly visible value, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "position_encoding" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def made(scheme: Any = None, *, seed: int = 0, build: Callable[[], Any] = llama, **options: Any) -> Any:
    """A random model with a scheme; `None` leaves it stock."""
    torch.manual_seed(seed)
    model = build()
    return randomize(model if scheme is None else hf_posenc.patch_model(model, scheme, **options))


def token_ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def outputs(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """`(batch, length, vocabulary or hidden)` of one forward call."""
    ids = token_ids() if ids is None else ids
    arguments = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model.eval()(input_ids=ids, use_cache=False, **arguments)[0]


def assert_same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Two models compute the same, or one computes given outputs."""
    expected = expected if isinstance(expected, torch.Tensor) else outputs(expected)
    torch.testing.assert_close(outputs(found), expected, rtol=0, atol=tolerance)


@contextmanager
def refused(message: str, *models: Any, error: Any = CheckpointError) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises an error, and leaves the weights and the schemes of some models as they were."""
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    with pytest.raises(error, match=message) as caught:
        yield caught
    for model, weights in zip(models, before, strict=True):
        after = model.state_dict()
        assert after.keys() == weights.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in weights.items())


# Folders

FORMS = ("whole", "sharded", "bin", "sharded bin")


def written(model: Any, folder: Path, form: str = "whole") -> Path:
    """Saves a model in one of the forms in which transformers reads weights."""
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if form.startswith("sharded") else {}))
    if form.endswith("bin"):
        for file in folder.glob("*.safetensors"):
            torch.save(load_file(file), folder / f"pytorch_{file.stem}.bin")
            file.unlink()
        for index in folder.glob("*.index.json"):
            text = index.read_text().replace(".safetensors", ".bin").replace("model-", "pytorch_model-")
            (folder / "pytorch_model.bin.index.json").write_text(text)
            index.unlink()
    return folder


def edit_json(path: Path, *where: str, **changes: Any) -> Path:
    """Sets keys of a JSON file, below the keys of `where`."""
    content = holder = json.loads(path.read_text())
    for key in where:
        holder = holder[key]
    holder.update(changes)
    for key in [key for key, value in changes.items() if value is ABSENT]:
        del holder[key]
    path.write_text(json.dumps(content))
    return path


def edit_weights(path: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Replaces the tensors of a safetensors file; `None` leaves one out."""
    changed = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def without_mark(folder: Path, entry_format: int = 1) -> Path:
    """Weights that do not name their scheme. Those of format 1 did not."""
    for path in folder.glob("*.safetensors"):
        edit_weights(path, lambda name, tensor: tensor if find_mark([name]) is None else None)
    edit_json(folder / "config.json", "position_encoding", format=entry_format)
    return folder


def as_format_1(folder: Path) -> Path:
    """Makes the JSON file of a scheme without its model one of format 1, which has no hash of its content."""
    return edit_json(folder / "position_encoding.json", format=1, sha256=ABSENT, adapter_weights=ABSENT)


def write_reference(model: PreTrainedModel, folder: Path, length: int = LENGTH) -> None:
    """What a fresh process needs to check that it loaded the same model."""
    place = folder / "reference"
    place.mkdir(parents=True)
    ids = token_ids(length)
    reference = {"ids": ids, "outputs": outputs(model, ids).float().contiguous()}
    reference["bfloat16"] = outputs(copy.deepcopy(model).to(torch.bfloat16), ids).float().contiguous()
    save_file(reference, place / "reference.safetensors")
    (place / "architecture").write_text(type(model).__name__)


def results_of(mode: str, root: Path) -> dict[str, Any]:
    """What `fresh_process.py` finds."""
    script = Path(__file__).with_name("fresh_process.py")
    text = printed(run_fresh(script.read_text(), mode, root, environment={"TOKENIZERS_PARALLELISM": "false"}))
    (line,) = [line for line in text.splitlines() if line.startswith("RESULTS ")]
    return json.loads(line.removeprefix("RESULTS "))


# Adapters

LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "r": 2}


def write_stock_llama(folder: Path, seed: int = 0) -> Path:
    """A Llama with random weights, and words `word3` to `word63` for its tokens."""
    made(seed=seed).save_pretrained(folder)
    words = ["[UNK]", "[PAD]", "[END]", *(f"word{number}" for number in range(3, VOCABULARY))]
    word_tokenizer(words, pad_token="[PAD]", eos_token="[END]").save_pretrained(folder)
    return folder


@functools.cache
def _loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def base(folder: Path, scheme: Any = None, **options: Any) -> Any:
    """The model of a stock folder that does not change, with a scheme whose parameters are not those of a fresh one."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options) if options else copy.deepcopy(_loaded(folder))
    torch.manual_seed(0)
    if scheme is not None:
        randomize(hf_posenc.patch_model(model, scheme).position_encoding)
    return model


def adapted(model: Any, config: Any = None) -> Any:
    """A PEFT model whose adapter does something."""
    import peft

    wrapped = peft.get_peft_model(model, config or peft.LoraConfig(**LORA))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return wrapped.eval()
