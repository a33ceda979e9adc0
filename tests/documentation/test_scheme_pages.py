"""Every scheme has a page, made when the site is built, and its statements are true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_posenc.schemes import get_scheme, registered_configs
from tests.documentation.built import page
from tests.documentation.conftest import DRAWN, ROOT, site_extension
from tests.models import tiny

#: "native" is a word for one of these, and "parts" and "cross_attention" say where they are. They have no page.
NAMES = [
    found.name
    for found in registered_configs()
    if found.__module__.startswith("hf_posenc.") and found.name not in ("native", "parts", "cross_attention")
]


@pytest.fixture(scope="module")
def scheme_pages() -> ModuleType:
    return site_extension("scheme_pages")


def test_every_registered_scheme_has_a_page_and_one_card_in_the_index(site: Path) -> None:
    folder = site / "reference" / "schemes"
    linked = [path.stem for _, path, _ in page(folder / "index.html").local_targets() if path.parent == folder]
    for name in NAMES:
        # In the navigation beside the page, and on a card.
        assert linked.count(name) >= 2
        assert f"<h1>{name}" in (folder / f"{name}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DRAWN)
def test_a_page_shows_its_figures_and_the_index_the_first_of_them(name: str, site: Path) -> None:
    folder = site / "reference" / "schemes"
    shown = [path for _, path, _ in page(folder / f"{name}.html").local_targets() if path.suffix == ".svg"]
    assert len(shown) >= 2
    assert all("<path" in path.read_text(encoding="utf-8") for path in shown)
    assert shown[0] in [path for _, path, _ in page(folder / "index.html").local_targets()]


def test_figures_are_drawn_again_only_if_their_code_has_changed(
    scheme_pages: ModuleType, repository: Path, site: Path
) -> None:
    stamp = repository / "docs" / "reference" / "schemes" / "figures" / "sources.txt"
    assert stamp.read_text() == scheme_pages.sources()


def tiny_model(name: str) -> Any:
    if name == "cross_attention":
        return tiny("BartForConditionalGeneration")
    if name == "local_global":
        layers = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
        return tiny("Gemma3ForCausalLM", num_hidden_layers=4, head_dim=64, layer_types=layers)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    return tiny(
        "LlamaForCausalLM", hidden_size=128, num_hidden_layers=4, num_attention_heads=2, head_dim=64,
        rope_parameters=rope,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_code_on_a_page_runs(name: str, scheme_pages: ModuleType) -> None:
    """Schemes around another one, and scales, keep what the model has."""
    torch.manual_seed(0)
    model, configs = tiny_model(name), []
    lines = scheme_pages.use(get_scheme(name)).splitlines()
    assert lines[-1] == "unpatch_model(model)"
    scope = {"model": model}
    exec(compile("\n".join(lines[:-1]), name, "exec"), scope)
    configs.append(model.position_encoding.config)
    exec(lines[-1], scope)
    assert not hasattr(model, "position_encoding")
    (config,) = configs
    if name in ("ssmax", "log_n_scale", "llama4_scale"):
        assert [part.name for part in config.parts] == ["rope", name]
        assert config.parts[0].theta == 500.0
        return
    # "local_global" becomes the schedule of the layers of the model.
    assert config.name == ("schedule" if name == "local_global" else name)
    inner = next((getattr(config, option) for option in ("inner", "segment") if hasattr(config, option)), None)
    if inner is not None and name != "cross_attention":
        assert inner.theta == 500.0


def test_a_page_names_parameters_that_are_trained_without_weight_decay(scheme_pages: ModuleType) -> None:
    facts = {name: scheme_pages.facts(scheme_pages.drawn(get_scheme(name))) for name in NAMES}
    said = {name for name in NAMES if any("without weight decay" in fact for fact in facts[name])}
    assert {"kerple", "learned_rope"} <= said
    assert not {"alibi", "rope", "interleaved"} & said


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("alibi", "The bias depends on distance only, and is computed once per distance."),
        ("cope", "The bias depends on queries, keys and the order of the tokens."),
        ("fire", "The bias depends on positions."),
        ("forget_gate", "The bias depends on hidden states and the order of the tokens."),
        ("low_rank_relative", "The bias depends on positions and hidden states."),
        ("shaw", "The bias depends on positions and queries."),
        ("transformer_xl", "The bias depends on positions, queries and keys."),
        ("rope", "Acts on: queries and keys."),
        ("rope", "Learned parameters: none."),
        ("interleaved", "Acts on what the schemes of its layers act on, and adds no parameters."),
    ],
)
def test_a_page_says_what_was_found_by_trying_the_scheme(name: str, fact: str, scheme_pages: ModuleType) -> None:
    assert fact in scheme_pages.facts(scheme_pages.drawn(get_scheme(name)))


@pytest.mark.parametrize(("name", "count"), [("learned", 512 * 768), ("fire", 5544), ("kerple", 24)])
def test_a_page_counts_learned_parameters(name: str, count: int, scheme_pages: ModuleType) -> None:
    facts = scheme_pages.facts(scheme_pages.drawn(get_scheme(name)))
    (counted,) = [re.search(r"Learned parameters: ([\d,]+)", fact) for fact in facts if "Learned" in fact]
    assert int(counted.group(1).replace(",", "")) == count


def test_a_page_shows_where_a_scheme_runs_what_it_costs_and_its_loss() -> None:
    results = site_extension("scheme_results").results
    (row,) = [line for line in results("alibi").splitlines() if "plug-in" in line]
    assert row == "| no | yes | yes | yes, not in T5 | plug-in | no |"
    price = json.loads((ROOT / "docs" / "results" / "price_decaying" / "results.json").read_text())["cells"]
    (alibi,) = [row for row in price["model train 4096"]["rows"] if row["subject"] == "alibi"]
    assert f"| {alibi['ratio']['median']:.3f} " in results("alibi")
    assert "1.264 ± 0.013" in results("alibi")
    # Gates that were never trained forget at once, so their time is left out.
    assert "price_decaying" not in results("forget_gate")
    assert all(results(name) for name in NAMES)


def test_arxiv_ids_are_links(site: Path) -> None:
    assert "https://arxiv.org/abs/2108.12409" in page(site / "reference" / "schemes" / "alibi.html").targets
