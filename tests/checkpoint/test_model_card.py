"""The model card of one's own patched model."""

from __future__ import annotations

import pytest
from huggingface_hub import EvalResult, ModelCard
from transformers import LlamaForCausalLM

import hf_posenc
from hf_posenc import PositionEncodingError, patch_model
from hf_posenc.checkpoint import model_card
from tests.models import tiny


@pytest.fixture
def llama():
    return patch_model(tiny("LlamaForCausalLM"), "rope", theta=500.0)


def test_a_card_says_scheme_loading_and_results(llama, tmp_path):
    score = EvalResult("text-generation", "wiki", "Wiki", "loss", 1.5, metric_name="Loss at 64 tokens")
    card = model_card(
        llama,
        model_id="me/llama-rope",
        base_model="owner/llama",
        license="mit",
        language="en",
        datasets=["wiki"],
        eval_results=[score],
        description="A short one.",
        sections={"Training data": "Some text.", "Limits": "It is tiny."},
    )
    card.save(tmp_path / "README.md")
    read = ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False)
    assert read.data.eval_results == [score]
    assert read.data.tags == ["hf_posenc", "position-encoding", "rope"]
    assert (read.data.base_model, read.data.license, read.data.datasets) == ("owner/llama", "mit", ["wiki"])
    assert (read.data.library_name, read.data.pipeline_tag) == ("transformers", "text-generation")
    for part in (
        "# me/llama-rope",
        "A short one.",
        '"theta": 500.0',
        "import hf_posenc  # before from_pretrained",
        'LlamaForCausalLM.from_pretrained("me/llama-rope")',
        "## Training data\n\nSome text.",
        "## Limits\n\nIt is tiny.",
        f"- hf_posenc {hf_posenc.__version__}",
        "2 attention layers",
    ):
        assert part in read.text
    assert "\n\n\n" not in read.text


def test_the_loading_example_runs(llama, tmp_path):
    folder = tmp_path / "model"
    llama.save_pretrained(folder)
    card = model_card(llama, model_id=str(folder))
    card.save(folder / "README.md")
    code = ModelCard.load(folder / "README.md").text.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    assert names["model"].position_encoding.config == llama.position_encoding.config


def test_what_a_model_has_no_task_for_has_none():
    card = model_card(patch_model(tiny("BertModel"), "alibi"), model_id="bert")
    assert card.data.pipeline_tag is None
    masked = model_card(patch_model(tiny("BertForMaskedLM"), "alibi"), model_id="bert")
    assert masked.data.pipeline_tag == "fill-mask"


def test_a_path_of_this_machine_is_no_base_model(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    card = model_card(loaded, model_id="me/llama")
    assert card.data.base_model is None
    assert str(tmp_path) not in card.content
    loaded.name_or_path = "owner/llama"
    assert model_card(loaded, model_id="me/llama").data.base_model == "owner/llama"


def test_a_model_without_a_scheme_gets_no_card():
    with pytest.raises(PositionEncodingError, match="not patched"):
        model_card(tiny("LlamaForCausalLM"), model_id="llama")


def test_an_adapter_names_the_patched_model_below_it(llama, tmp_path):
    peft = pytest.importorskip("peft")
    llama.save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
    with pytest.raises(PositionEncodingError, match="give base_model"):
        model_card(adapted, model_id="me/adapter")
    adapted.save_pretrained(tmp_path / "adapter")
    own = (tmp_path / "adapter" / "README.md").read_text()
    assert "hf_posenc" not in own
    card = model_card(adapted, model_id=str(tmp_path / "adapter"), base_model=str(tmp_path / "base"))
    card.save(tmp_path / "adapter" / "README.md")
    assert card.data.library_name == "peft"
    code = card.text.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    assert names["model"].get_base_model().position_encoding.config == llama.position_encoding.config
    # PEFT updates a card that is there, and leaves what it says of the scheme.
    adapted.save_pretrained(tmp_path / "adapter")
    assert '"theta": 500.0' in ModelCard.load(tmp_path / "adapter" / "README.md").text


def test_unknown_names_of_the_package_are_named():
    with pytest.raises(AttributeError, match="model_card"):
        hf_posenc.checkpoint.model_cart  # noqa: B018
