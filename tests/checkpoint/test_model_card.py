"""The model card of one's own patched model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCard
from transformers import LlamaForCausalLM

import hf_posenc
from hf_posenc import PositionEncodingError, patch_model
from hf_posenc.checkpoint import model_card
from tests.models import tiny
from tests.patching.composites.models import COMPOSITES


@pytest.fixture
def llama() -> Any:
    return patch_model(tiny("LlamaForCausalLM"), "rope", theta=500.0)


def example_of(card: ModelCard) -> Any:
    """The model that the loading example gives."""
    names: dict[str, Any] = {}
    exec(card.text.split("```python\n")[1].split("```")[0], names)
    return names["model"]


def test_a_card_says_scheme_loading_and_results(llama: Any, tmp_path: Path) -> None:
    score = EvalResult("text-generation", "wiki", "Wiki", "loss", 1.5, metric_name="Loss at 64 tokens")
    card = model_card(
        llama, model_id="me/llama-rope", base_model="owner/llama", license="mit", language="en", datasets=["wiki"],
        eval_results=[score], description="A short one.",
        sections={"Training data": "Some text.", "Limits": "It is tiny."},
    )  # fmt: skip
    card.save(tmp_path / "README.md")
    read = ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False)
    assert read.data.eval_results == [score]
    assert read.data.tags == ["hf_posenc", "position-encoding", "rope"]
    assert (read.data.base_model, read.data.license, read.data.datasets) == ("owner/llama", "mit", ["wiki"])
    assert (read.data.library_name, read.data.pipeline_tag) == ("transformers", "text-generation")
    for part in (
        "# me/llama-rope", "A short one.", '"theta": 500.0', "import hf_posenc  # before from_pretrained",
        'LlamaForCausalLM.from_pretrained("me/llama-rope")', "## Training data\n\nSome text.",
        "## Limits\n\nIt is tiny.", f"- hf_posenc {hf_posenc.__version__}", "2 attention layers",
    ):  # fmt: skip
        assert part in read.text
    assert "\n\n\n" not in read.text


def test_the_loading_example_runs_and_names_no_path_of_this_machine(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    card = model_card(llama, model_id=str(tmp_path))
    card.save(tmp_path / "README.md")
    loaded = example_of(ModelCard.load(tmp_path / "README.md"))
    assert loaded.position_encoding.config == llama.position_encoding.config
    card = model_card(loaded, model_id="me/llama")
    assert card.data.base_model is None
    assert str(tmp_path) not in card.content
    loaded.name_or_path = "owner/llama"
    assert model_card(loaded, model_id="me/llama").data.base_model == "owner/llama"


@pytest.mark.parametrize(("architecture", "task"), [("BertModel", None), ("BertForMaskedLM", "fill-mask")])
def test_a_card_has_the_task_of_the_class(architecture: str, task: str | None) -> None:
    assert model_card(patch_model(tiny(architecture), "alibi"), model_id="bert").data.pipeline_tag == task


def test_a_card_names_the_scheme_of_each_part() -> None:
    model = patch_model(patch_model(COMPOSITES["llava"].model(), "t5"), "none", part="vision")
    card = model_card(model, model_id="me/llava")
    assert card.data.tags == ["hf_posenc", "position-encoding", "t5", "none"]
    assert card.data.pipeline_tag == "image-text-to-text"
    assert "replaced in its text part by `t5` and in its vision part by `none`" in str(card)


def test_a_model_without_a_scheme_gets_no_card_and_other_names_are_unknown() -> None:
    with pytest.raises(PositionEncodingError, match="not patched"):
        model_card(tiny("LlamaForCausalLM"), model_id="llama")
    with pytest.raises(AttributeError, match="model_card"):
        _ = hf_posenc.checkpoint.model_cart


def test_an_adapter_names_the_patched_model_below_it(llama: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    llama.save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
    with pytest.raises(PositionEncodingError, match="give base_model"):
        model_card(adapted, model_id="me/adapter")
    adapted.save_pretrained(tmp_path / "adapter")
    readme = tmp_path / "adapter" / "README.md"
    assert "hf_posenc" not in readme.read_text()
    card = model_card(adapted, model_id=str(tmp_path / "adapter"), base_model=str(tmp_path / "base"))
    card.save(readme)
    assert card.data.library_name == "peft"
    assert example_of(card).get_base_model().position_encoding.config == llama.position_encoding.config
    # PEFT updates a card that is there, and leaves what it says of the scheme.
    adapted.save_pretrained(tmp_path / "adapter")
    assert '"theta": 500.0' in ModelCard.load(readme).text
