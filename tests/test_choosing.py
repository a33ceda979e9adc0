"""Every number on the page docs/choosing.md is in a table that the same sentence links to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_posenc import patch_model
from tests.models import tiny, word_tokenizer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "choosing.md"
#: A measured value with at least two decimals or an interval. "± 0.1" and "+-" are joined to their value.
VALUE = re.compile(r"-?\d+\.\d{2,}(?: ± \d+\.\d+)?|\d+ ± \d+")


def statements() -> list[str]:
    """Items of lists and tables, each in one line. The head of a table has its links."""
    text = re.sub(r"```.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    items = re.findall(r"^- (.*?)(?=\n- |\n\n|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(item.split()) for item in (*items, *re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE))]


def values(text: str) -> list[str]:
    return VALUE.findall(re.sub(r"\([^()]*\.md[^()]*\)|arXiv:\S+", "", text))


MEASURED = [statement for statement in statements() if values(statement) and ".md" in statement]


@pytest.mark.parametrize("statement", MEASURED, ids=lambda text: text[:40])
def test_each_number_stands_in_a_table_that_is_linked_beside_it(statement: str) -> None:
    linked = [PAGE.parent / target for target in re.findall(r"\]\(([^)#]+\.md)", statement)]
    sources = " ".join(" ".join(path.read_text(encoding="utf-8").split()) for path in linked)
    assert [value for value in values(statement) if value not in sources] == []


def test_most_statements_are_measured() -> None:
    assert len(MEASURED) >= 20
    assert [text for text in statements() if values(text) and ".md" not in text] == []


SECTIONS = [section for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:] if "```python" in section]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_the_code_of_each_goal_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    encoder = "BERT" in section.splitlines()[0] or "encoder" in section.splitlines()[0]
    scope = {
        "model": tiny("BertModel" if encoder else "LlamaForCausalLM", vocab_size=16),
        "tokenizer": word_tokenizer(["[UNK]", "dog"], model_max_length=64),
        "patch_model": patch_model,
    }
    exec(compile(re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0], str(PAGE), "exec"), scope)
    assert (tmp_path / "exported" / "config.json").is_file() or scope["model"].position_encoding.config is not None
