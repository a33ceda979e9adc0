"""The model card of a user's patched model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import (
    LlamaForCausalLM,
)

import hf_posenc
from hf_posenc import PositionEncodingError, patch_model, unpatch_model
from hf_posenc.checkpoint import model_card
from hf_posenc.checkpoint.cards import write_card
from hf_posenc.version import REPOSITORY
from tests.cli.conftest import save_tokenizer
from tests.fresh import printed, run_fresh
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


OWN_SCHEME = """
import hf_posenc

@hf_posenc.distance_bias
def square_root(distance):
    return -distance.abs().sqrt()
"""


def test_the_example_imports_the_module_of_an_own_scheme(tmp_path: Path) -> None:
    def run(program: str) -> str:
        return printed(run_fresh(f"import sys\nsys.path.append('.')\n{program}", folder=tmp_path))

    (tmp_path / "schemes_of_mine.py").write_text(OWN_SCHEME)
    save = (
        "from tests.models import tiny\nhf_posenc.patch_model(tiny('LlamaForCausalLM'), 'square_root').save_pretrained"
    )
    run(f"import hf_posenc, schemes_of_mine\n{save}('model')")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "hf-posenc --import schemes_of_mine export" in card
    assert "is `square_root`, from `schemes_of_mine`, which extends the package [hf_posenc]" in card
    assert "square_root" in run(card.split("```python\n")[1].split("```")[0])
    run(f"{OWN_SCHEME}\n{save}('script')")
    assert "run the code that registers: square_root." in (tmp_path / "script" / "README.md").read_text()


def test_a_card_names_the_scheme_of_each_part() -> None:
    model = patch_model(patch_model(COMPOSITES["llava"].model(), "t5"), "none", part="vision")
    card = model_card(model, model_id="me/llava")
    assert card.data.tags == ["hf_posenc", "position-encoding", "t5", "none"]
    assert card.data.pipeline_tag == "image-text-to-text"
    assert "replaced in its text part by `t5` and in its vision part by `none`" in str(card)
    assert "is `text: t5; vision: none`" in str(card)


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
    readme = tmp_path / "adapter" / "README.md"
    for _ in range(2):
        adapted.save_pretrained(tmp_path / "adapter")
        assert readme.read_text().count("## Position encoding") == 1
    assert f'PeftModel.from_pretrained(base, "{readme.parent.name}")' in readme.read_text()
    assert "### Framework versions\n\n- PEFT" in readme.read_text()
    tags = ModelCard.load(readme).data.tags
    assert {"hf_posenc", "rope", "lora"} <= {*tags}
    card = model_card(adapted, model_id=str(tmp_path / "adapter"), base_model=str(tmp_path / "base"))
    card.save(readme)
    assert card.data.library_name == "peft"
    assert example_of(card).get_base_model().position_encoding.config == llama.position_encoding.config
    # PEFT updates a card that is there.
    adapted.save_pretrained(tmp_path / "adapter")
    assert '"theta": 500.0' in ModelCard.load(readme).text


def test_a_save_writes_one_section_and_keeps_the_text_around_it(llama: Any, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    by_hand = (
        "---\n# by hand\nlicense: mit\ntags: [mine]\nmodel-index: broken\n---\n\n# My model\r\n\nCaf\xe9 \udce9.\n"
    ).encode(errors="surrogateescape")
    card.write_bytes(by_hand)
    llama.save_pretrained(tmp_path)
    assert by_hand.partition(b"---\n\n")[2].rstrip() in card.read_bytes()
    card.write_bytes(card.read_bytes() + b"\n## Limits\n\nIt is tiny.\n")
    patch_model(llama, "alibi")
    llama.save_pretrained(tmp_path)
    text = card.read_text(errors="surrogateescape")
    assert text.count("## Position encoding") == 1
    assert text.index("# My model") < text.index("is `alibi`") < text.index("## Limits")
    assert "rope" not in text.partition("# My model")[0]
    assert "model-index: broken" in text, "what the hub cannot read is not lost"
    again = card.read_bytes()
    llama.save_pretrained(tmp_path)
    assert card.read_bytes() == again
    unpatch_model(llama).save_pretrained(tmp_path)
    text = card.read_text(errors="surrogateescape")
    assert not {"hf_posenc", "alibi"} & {*text.split()}
    assert text.endswith("# My model\n\nCaf\xe9 \udce9.\n\n## Limits\n\nIt is tiny.\n")
    assert "tags:\n- mine\n" in text


GENERATED = "This model card has been automatically generated."


#: READMEs, and what they are after the section and its tags are removed again, if that is not the same.
READMES: list[tuple[str, str | None]] = [
    ("", None),
    ("no metadata\n", None),
    ("\ufeff# Mine\n", None),
    ("---\n: {\n---\n", None),
    ("---\n- a list\n---\n", None),
    ("---\ntags:\n- a: b\n---\n", None),
    ("---\ntags: 5\n---\n", "---\ntags:\n- 5\n---\n"),
    ("---\nlicense: mit\n...\n# Mine\n", None),
    (f"---\nlicense: [mit\n---\n{GENERATED}\n", None),
    ("\ufeff\n---\nlanguage: no\nversion: 1.10  # as text\n---\nText.\n", None),
    ("---\ntags: [a,\n  b]  # mine\n# a comment\n---\nText.\n", "---\ntags:\n- a\n- b\n# a comment\n---\nText.\n"),
    ("---\nlicense: mit\r\ntags:\n- a\nauthor: me\n---\nText.\n", None),
]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("text", "after"), READMES)
def test_any_readme_gets_the_section_and_loses_it_again(
    llama: Any, tmp_path: Path, text: str, after: str | None, end: str
) -> None:
    readme = tmp_path / "README.md"
    readme.write_bytes(text.replace("\n", end).encode())
    llama.save_pretrained(tmp_path)
    written = readme.read_bytes().decode()
    assert written.count("is `rope(theta=500)`") == 1
    assert written[:1] == text[:1] or "\ufeff" not in text
    assert not text or written.count("\n") == written.count(end)
    assert written.count("---\n".replace("\n", end)) <= 3
    unpatch_model(llama).save_pretrained(tmp_path)
    assert readme.read_bytes() == (text if after is None else after).replace("\n", end).encode()


@pytest.mark.parametrize(
    "by_hand", [("", ""), ("---\n\n", "license: mit\n---\n\n"), ("[More Information Needed]", "Me")]
)
def test_a_generated_card_is_replaced_unless_it_was_filled_in(llama: Any, tmp_path: Path, by_hand: Any) -> None:
    readme, kept = tmp_path / "README.md", ModelCardData(library_name="transformers", tags=["mine"])
    text = ModelCard.from_template(kept, model_description=GENERATED).content.replace(*by_hand, 1)
    readme.write_text(text)
    llama.save_pretrained(tmp_path)
    assert ModelCard.load(readme).data.tags == ["mine", "hf_posenc", "position-encoding", "rope"]
    assert (text.partition("# Model Card")[2] in readme.read_text()) == (by_hand[1] != "")
    assert by_hand[1] in readme.read_text().replace("tags:\n- mine\n- hf_posenc\n- position-encoding\n- rope\n", "")


def test_a_section_of_another_card_is_removed_with_its_tags_and_text_behind_half_a_one_is_kept(
    llama: Any, tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    llama.save_pretrained(tmp_path)
    other = readme.read_text()
    patch_model(llama, "alibi").save_pretrained(tmp_path)
    pasted = other.partition("# ")[2].join(readme.read_text().split("\n\n", 1))
    readme.write_text(pasted.replace("- alibi", "- alibi\n- rope"))
    llama.save_pretrained(tmp_path)
    assert readme.read_text().count("## Position encoding") == 1
    assert ModelCard.load(readme).data.tags == ["hf_posenc", "position-encoding", "alibi"]
    readme.write_text(f"{other[: other.index('### Load it')]}\n## Limits\n\nIt is tiny.\n")
    for _ in range(2):
        llama.save_pretrained(tmp_path)
        assert "## Limits\n\nIt is tiny." in readme.read_text()


def test_a_name_that_was_given_is_kept_and_that_of_a_folder_is_not(llama: Any, tmp_path: Path) -> None:
    readme, example = tmp_path / "README.md", 'from_pretrained("{}")'.format
    model_card(llama, model_id="me/llama-rope").save(readme)
    for scheme in ("alibi", "t5"):
        patch_model(llama, scheme).save_pretrained(tmp_path)
        assert readme.read_text().startswith("---\n")
        assert "# me/llama-rope" in readme.read_text()
        assert example("me/llama-rope") in readme.read_text()
        assert f"is `{scheme}`" in readme.read_text()
    for folder in (tmp_path / "one", tmp_path / "two"):
        llama.save_pretrained(folder)
        assert example(folder.name) in (folder / "README.md").read_text()
    moved = (tmp_path / "one").rename(tmp_path / "three")
    llama.save_pretrained(moved)
    assert example("three") in (moved / "README.md").read_text()


def test_commands_can_be_typed_for_a_folder_of_any_name(llama: Any, tmp_path: Path) -> None:
    folder = tmp_path / "my model (new)"
    llama.save_pretrained(folder)
    text = (folder / "README.md").read_text()
    for command in ("hf-posenc serve", "vllm serve", "hf-posenc export"):
        assert f"{command} 'my model (new)'" in text


def _protected(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.write_text("# Mine\n")
    patch.setattr(os, "access", lambda place, mode: os.fspath(place) != str(path))


UNWRITABLE: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "Permission denied": _protected,
    "Is a directory": lambda path, patch: path.mkdir(),
    "not in UTF-8": lambda path, patch: path.write_text("# Mine\n", "utf-16"),
    "No such file": lambda path, patch: path.symlink_to("nowhere/README.md"),
}


@pytest.mark.parametrize("reason", UNWRITABLE)
def test_a_readme_that_cannot_be_changed_is_told_and_the_model_is_saved(
    llama: Any, tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    UNWRITABLE[reason](readme, monkeypatch)
    before = os.lstat(readme)
    for save in (llama.save_pretrained, lambda folder: write_card(llama, folder)):
        with pytest.warns(UserWarning, match=rf"README.md in .* cannot be replaced \({reason}"):
            save(tmp_path)
    assert (os.lstat(readme).st_ino, os.lstat(readme).st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.position_encoding.config == llama.position_encoding.config
    unpatch_model(llama).save_pretrained(tmp_path)


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(llama: Any, tmp_path: Path) -> None:
    card, folder = tmp_path / "docs" / "card.md", tmp_path / "model"
    card.parent.mkdir()
    folder.mkdir()
    (folder / "README.md").symlink_to("../docs/card.md")
    for _ in range(2):
        llama.save_pretrained(folder)
        assert (folder / "README.md").is_symlink()
        assert card.read_text().count("is `rope(theta=500)`") == 1


def test_the_cards_of_other_libraries_have_the_section(llama: Any, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(llama, TrainingArguments(str(tmp_path / "trainer"), report_to="none", use_cpu=True))
    trainer.save_model()
    for _ in range(2):
        trainer.create_model_card(model_name="mine")
    card = (tmp_path / "trainer" / "README.md").read_text()
    assert card.count("is `rope(theta=500)`") == 1
    assert "### Training hyperparameters" in card
    sentence_transformers = pytest.importorskip("sentence_transformers")
    bert = tmp_path / "bert"
    patch_model(tiny("BertModel"), "t5").save_pretrained(bert)
    save_tokenizer(bert)
    sentence_transformers.SentenceTransformer(str(bert), device="cpu").save(str(tmp_path / "encoder"))
    card = (tmp_path / "encoder" / "README.md").read_text()
    assert "# SentenceTransformer" in card
    assert card.count("is `t5`") == 1


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_the_section_says_whether_vllm_runs_it(scheme: str) -> None:
    text = model_card(patch_model(tiny("LlamaForCausalLM"), scheme), model_id="me/llama").text
    assert ("`vllm serve me/llama`" in text) == (scheme == "alibi")
    assert ("vLLM does not run it: it adds a bias to the logits (T5Bias)" in text) == (scheme == "t5")
    assert f"pip install git+{REPOSITORY}" in text
