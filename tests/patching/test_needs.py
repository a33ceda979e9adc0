"""The table of environments, run: where it says that something is lacking, the scheme is refused with that message, and
where it says nothing, the numbers are those of the plain computation."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig

from hf_posenc import UnsupportedError
from hf_posenc.recipes import begin_blend
from hf_posenc.schemes import refusals
from hf_posenc.schemes.needs import Environment, Need
from tests.architectures.inputs import inputs_for
from tests.architectures.population import pair_named
from tests.architectures.tiny import tiny_model
from tests.kits.decoding import decoded
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.running import distance, patched, placed, tokens
from tests.matrix.test_behaviour import CLOSE, SCHEMES
from tests.models import tiny
from tests.patching.test_continuous_batching import alone, batched, prompts
from tests.patching.test_refused_patches import OTHERS as OTHER_MODELS
from tests.schemes.table import TABLE
from tests.thinning import mostly_slow

IDS = tokens(1, 12)
SETTINGS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
#: Schemes that no row of the table of schemes has, each with a need of its own.
OTHERS: dict[str, Any] = {
    "dynamic": {"scheme": "rope", "scaling": {"type": "dynamic", "factor": 4.0, "original_max_positions": 8}},
    "separators": {"scheme": "hierarchical", "separators": [7]},
    "scaled_alibi": [{"scheme": "alibi"}, {"scheme": "ssmax"}],
    "whole_positions": {"scheme": "randomized", "inner": "rope", "max_position": 64},
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The weights of a model do not depend on the tests before."""
    torch.manual_seed(0)


def needs_of_schemes() -> dict[str, frozenset[Need]]:
    """One scheme for each set of needs, as a Llama has them."""
    logging.disable(logging.WARNING)
    chosen: dict[frozenset[Need], str] = {}
    for name, scheme in (SCHEMES | OTHERS).items():
        chosen.setdefault(frozenset(patched("llama_gqa", scheme).position_encoding.needs()), name)
    logging.disable(logging.NOTSET)
    return {name: needs for needs, name in chosen.items()}


NEEDS = needs_of_schemes()


def with_scheme(model: Any, scheme: str) -> Any:
    return placed(model.eval(), (SCHEMES | OTHERS)[scheme])


def logits(model: Any, ids: Tensor = IDS, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


def refused_or_stepwise(model: Any, scheme: str) -> tuple[Tensor, Tensor]:
    """Of a decoder: the logits with a cache, and without. A scheme that no cache can hold is compared without one."""
    model = with_scheme(model, scheme)
    whole = logits(model, use_cache=False)
    grows = not refusals.GROWING_CACHE.problem(model.position_encoding.needs())
    return (decoded(model, IDS, None, [8, 1, 1, 1, 1]) if grows else logits(model, use_cache=False)), whole


def generated(model: Any, **options: Any) -> Tensor:
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **(SETTINGS | options))


def growing(scheme: str) -> tuple[Tensor, Tensor]:
    model = with_scheme(tiny("LlamaForCausalLM"), scheme)
    found = generated(model, prompt_lookup_num_tokens=2)
    return found, generated(model, use_cache=False)


def quantised(scheme: str) -> tuple[Tensor, Tensor]:
    """The prompt is rounded to eight bits, which choose the same tokens here."""
    pytest.importorskip("hqq", reason="hqq is not installed")
    model = with_scheme(tiny("LlamaForCausalLM"), scheme)
    if refusals.GROWING_CACHE.problem(model.position_encoding.needs()):
        pytest.skip("no cache holds this scheme")
    config = {"backend": "hqq", "nbits": 8, "residual_length": 64, "q_group_size": 16, "axis_key": 1, "axis_value": 1}
    found = generated(model, cache_implementation="quantized", cache_config=config)
    return found, generated(model, use_cache=False)


def packed(scheme: str) -> tuple[Tensor, Tensor]:
    model = with_scheme(tiny("LlamaForCausalLM"), scheme)
    positions = torch.tensor([[*range(7), *range(5)]])
    found = logits(model, position_ids=positions, use_cache=False)
    return found, torch.cat([logits(model, row, use_cache=False) for row in IDS.split((7, 5), dim=1)], dim=1)


def paged(scheme: str) -> tuple[Tensor, Tensor]:
    model = with_scheme(tiny("LlamaForCausalLM", num_attention_heads=4), scheme)
    model.set_attn_implementation("sdpa")
    prompt = prompts()[1]
    (found, _), (expected, _) = batched(model, [prompt])[0], alone(model, prompt)
    return torch.tensor(found), torch.tensor(expected)


def in_graphs(scheme: str) -> tuple[Tensor, Tensor]:
    """Without a GPU a graph cannot be captured: what is allowed starts."""
    model = with_scheme(tiny("LlamaForCausalLM"), scheme)
    if refusals.PAGES.problem(model.position_encoding.needs()):
        pytest.skip("no pages hold this scheme")
    config = ContinuousBatchingConfig(use_cuda_graph=True)
    model.init_continuous_batching(continuous_batching_config=config)
    return torch.zeros(1), torch.zeros(1)


def prompted(scheme: str) -> tuple[Tensor, Tensor]:
    """New adaption prompts change nothing."""
    peft = pytest.importorskip("peft")
    model = with_scheme(tiny("LlamaForCausalLM"), scheme)
    before = logits(model, use_cache=False)
    config = peft.AdaptionPromptConfig(adapter_layers=2, adapter_len=4, task_type="CAUSAL_LM")
    return logits(peft.get_peft_model(model, config).eval(), use_cache=False), before


def pooled(scheme: str) -> tuple[Tensor, Tensor]:
    """Every picture is read as if it were alone."""
    if scheme == "learned":
        pytest.skip("more patches than rows")
    pair = pair_named("vision-hiera")
    model = with_scheme(tiny_model(pair), scheme)
    pixels = inputs_for(model, pair)["pixel_values"]
    with torch.no_grad():
        both = model(pixel_values=torch.cat((pixels, pixels.flip(-1)))).last_hidden_state
        rows = [model(pixel_values=each).last_hidden_state for each in (pixels, pixels.flip(-1))]
    return both, torch.cat(rows)


def sparse(scheme: str) -> tuple[Tensor, Tensor]:
    """Every text is read as if it were alone, and without padding."""
    model = with_scheme(tiny("LongformerForMaskedLM", attention_window=[8, 8], pad_token_id=0), scheme)
    padded = torch.cat((torch.zeros_like(IDS[:, :3]), IDS), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    return logits(model, padded, attention_mask=mask)[:, 3:], logits(model)


def gradual(scheme: str) -> tuple[Tensor, Tensor]:
    """A swap that begins has not changed anything."""
    if scheme == "blended":
        pytest.skip("a blend takes no blend")
    model = with_scheme(tiny("LlamaForCausalLM"), "none")
    before = logits(model, use_cache=False)
    begin_blend(model, (SCHEMES | OTHERS)[scheme])
    return logits(model, use_cache=False), before


@dataclass(frozen=True)
class Trial:
    """A run of an environment.

    Args:
        environment: what is tried.
        run: returns what it computes with a scheme, and what it should be.
        exact: whether these are tokens.
    """

    environment: Environment
    run: Callable[[str], tuple[Tensor, Tensor]]
    exact: bool = False


def of_decoder(build: Callable[[], Any]) -> Callable[[str], tuple[Tensor, Tensor]]:
    return lambda scheme: refused_or_stepwise(build(), scheme)


TRIALS = {
    "growing cache": Trial(refusals.GROWING_CACHE, growing, exact=True),
    "quantised cache": Trial(refusals.QUANTISED_CACHE, quantised, exact=True),
    "sliding cache": Trial(refusals.SLIDING_CACHE, of_decoder(ARCHITECTURES["mistral_sliding"].build)),
    "packed rows": Trial(refusals.PACKED_ROWS, packed),
    "pages": Trial(refusals.PAGES, paged, exact=True),
    "pages in graphs": Trial(refusals.PAGES_IN_GRAPHS, in_graphs),
    "adaption prompts": Trial(refusals.ADAPTION_PROMPTS, prompted),
    "latent attention": Trial(refusals.LATENT_ATTENTION, of_decoder(ARCHITECTURES["deepseek_v3_mla"].build)),
    "capped logits": Trial(refusals.CAPPED_LOGITS, of_decoder(OTHER_MODELS["capped logits"])),
    "shared keys": Trial(refusals.SHARED_KEYS, of_decoder(OTHER_MODELS["shared keys"])),
    "changed queries": Trial(
        refusals.CHANGED_QUERIES, of_decoder(lambda: tiny("HunYuanDenseV1ForCausalLM", head_dim=8))
    ),
    "pooled patches": Trial(refusals.POOLED_PATCHES, pooled),
    "sparse attention": Trial(refusals.SPARSE_ATTENTION, sparse),
    "gradual swap": Trial(refusals.GRADUAL_SWAP, gradual),
}
#: Run elsewhere, for they need two processes, a GPU's kernels, or an engine: tests/distributed,
#: tests/patching/test_continuous_batching.py, tests/architectures and tests/serving. What a cache that drops tokens
#: computes is compared with a mask in tests/patching/test_evicting_caches.py, and every scheme between two sequences
#: in tests/patching/test_cross_attention.py.
ELSEWHERE = (
    refusals.CROSS_ATTENTION,
    refusals.EVICTING_CACHE,
    refusals.CONTEXT_PARALLELISM,
    refusals.SHARDED_WEIGHTS,
    refusals.PAGES_OF_FLASH,
    refusals.CACHE_OF_OTHERS,
    refusals.VLLM,
    refusals.SGLANG,
)


def test_every_environment_is_tried() -> None:
    tried = [*(trial.environment for trial in TRIALS.values()), *ELSEWHERE]
    assert set(map(id, tried)) == set(map(id, refusals.ENVIRONMENTS))


def lacking(scheme: str, name: str) -> list[tuple[Need, str]]:
    """The needs of a scheme that an environment lacks, in the order of the table."""
    return [(need, why) for need, why in TRIALS[name].environment.lacks.items() if need in NEEDS[scheme]]


def cells() -> list[Any]:
    """Every scheme in every environment. The default run takes each refusal once, and computes one cell in three."""
    said: set[Any] = set()
    chosen = set()
    for number, cell in enumerate(itertools.product(NEEDS, TRIALS)):
        reasons = (cell[1], *lacking(*cell)[:1])
        if number % 3 == 0 if len(reasons) == 1 else reasons not in said:
            chosen.add(cell)
        said.add(reasons)
    return mostly_slow(itertools.product(NEEDS, TRIALS), chosen.__contains__)


@pytest.mark.parametrize(("scheme", "name"), cells())
def test_a_scheme_is_refused_as_the_table_says_or_computed(scheme: str, name: str) -> None:
    trial = TRIALS[name]
    if name in ("pooled patches", "sparse attention") and TABLE.get(scheme) is not None and TABLE[scheme].causal_only:
        pytest.skip("no bidirectional model takes this scheme")
    if reasons := lacking(scheme, name):
        with pytest.raises(UnsupportedError) as caught:
            trial.run(scheme)
        need, why = reasons[0]
        assert f"it {need.value} (" in str(caught.value)
        assert why in str(caught.value)
        return
    found, expected = trial.run(scheme)
    assert torch.equal(found, expected) if trial.exact else distance(found, expected) <= CLOSE
