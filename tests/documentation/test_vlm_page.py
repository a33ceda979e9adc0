"""The how-to page on vision-language models: its files run on tiny models with random weights."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from transformers import CLIPImageProcessorPil, LlavaProcessor

from hf_posenc.cli import parser as shell
from tests.documentation.pages import commands, saved_files
from tests.documentation.test_how_to import empty_folder, run_file  # noqa: F401
from tests.fresh import printed, run_fresh
from tests.models import word_tokenizer
from tests.patching.composites.models import COMPOSITES

PAGE = "another_encoding_in_a_vlm"
NAME = "llava-hf/llava-interleave-qwen-0.5b-hf"
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def save_tiny_models() -> None:
    """A Llava and a Qwen2-VL with random weights, and a processor for the Llava."""
    COMPOSITES["qwen2_vl"].model().save_pretrained("qwen")
    COMPOSITES["llava"].model().save_pretrained("stock")
    words = ["Which", "colour", "is", "this", "?", "It", "red", "blue", "."]
    vocabulary = {"[UNK]": 9, "<image>": 3} | {word: 10 + number for number, word in enumerate(words)}
    tokenizer = word_tokenizer(vocabulary, pad_token="[UNK]", additional_special_tokens=["<image>"])
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )  # fmt: skip
    processor.save_pretrained("stock")


def smaller(text: str) -> str:
    names = text.replace(NAME, "stock").replace("Qwen/Qwen2-VL-2B-Instruct", "qwen")
    return re.sub(r"STEPS = \d+", "STEPS = 4", names).replace("lr=1e-4", "lr=1e-2")


@pytest.mark.long
def test_the_files_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_models()
    for name, text in saved_files(PAGE).items():
        Path(name).write_text(smaller(text), encoding="utf-8")
    try:
        run_file("patch.py")
        said = capsys.readouterr().out
        assert "part: text; vision unchanged" in said
        stock, again = re.findall(r"^(?:stock|again stock): (.*)$", said, flags=re.MULTILINE)
        assert stock == again
        losses = run_file("train.py")["losses"]
        assert losses[2] < losses[0]
        assert Path("llava-lora", "position_encoding.json").is_file()
        run_file("vision.py")
        assert "rope_nd(assignment=mixed)" in capsys.readouterr().out
        program = "import sys\nsys.path.append(sys.argv[1])\n" + Path("reload.py").read_text(encoding="utf-8")
        text = printed(run_fresh(program, Path.cwd()))
        assert "('text', 'vision')" in text
        assert float(text.partition("largest difference: ")[2]) <= 1e-5
        run_file("qwen.py")
        assert len(set(capsys.readouterr().out.splitlines()[1:])) == 3
    finally:
        sys.modules.pop("ask", None)


def test_the_commands_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_models()
    for words in commands(PAGE, "hf-posenc"):
        assert shell.main([word.replace(NAME, "stock") for word in words]) == 0, capsys.readouterr().err
    assert "text: p_rope" in capsys.readouterr().out
    assert {words[0] for words in commands(PAGE, "python")} | {"ask.py"} == set(saved_files(PAGE))
