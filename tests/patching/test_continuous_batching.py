"""Continuous batching of a patched model: equal to plain generation, or refused at the call."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

from hf_posenc import SequenceLengthError, UnsupportedError, patch_model, unpatch_model
from tests.attention.fused import causal, flash_kernel
from tests.matrix.running import patched, tokens
from tests.matrix.test_behaviour import SCHEMES
from tests.thinning import mostly_slow

YARN = {"scheme": "rope", "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 16}}
NTK = {"scheme": "rope", "scaling": {"type": "dynamic", "factor": 4.0, "original_max_positions": 8}}
REPO = {"scheme": "repo", "initial_std": 0.5}
SETTINGS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
#: Sums of some hundred terms in another order, in float32.
CLOSE = 2e-5
#: Prompts of several lengths, the longest of which is read in three pieces.
PAGED: dict[str, Any] = {"num_blocks": 16, "max_batch_tokens": 16}
# Transformers 5.17 has another name for it.
PAGED["page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"] = 8
#: One scheme for each way in which keys reach the attention function: what the default run tries.
WAYS = ("rope", "sinusoidal", "alibi", "t5", "forget_gate", "cope", "self_extend", "pope", "ssmax", "composed")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def prompts() -> list[list[int]]:
    return [tokens(1, length, seed)[0].tolist() for seed, length in enumerate((5, 9, 12, 30))]


def results_of(
    model: Any, given: list[list[int]], settings: dict[str, Any] = SETTINGS, kept: bool = False, **paged: Any
) -> dict[str, Any]:
    return model.generate_batch(
        given,
        generation_config=GenerationConfig(**settings, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**(PAGED | paged)),
        persistent_manager=kept,
        warmup=False,
    )


def batched(model: Any, given: list[list[int]], **paged: Any) -> list[tuple[list[int], list[float]]]:
    """The tokens that continue each prompt, with the logarithms of their probabilities."""
    results = results_of(model, given, return_logprobs=True, **paged)
    assert [result.error for result in results.values()] == [None] * len(given)
    return [(result.generated_tokens, result.logprobs) for result in results.values()]


def alone(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The same of one prompt, by `generate` without a cache."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        use_cache=False,
        output_logits=True,
        return_dict_in_generate=True,
        **SETTINGS,
        eos_token_id=None,
    )
    best = [float(logits[0].float().log_softmax(-1).max()) for logits in result.logits]
    return result.sequences[0, len(prompt) :].tolist(), best


def assert_batches_equal_prompts_alone(model: Any, given: list[list[int]], **paged: Any) -> None:
    expected = [alone(model, prompt) for prompt in given]
    for (found_tokens, found), (wanted_tokens, wanted) in zip(batched(model, given, **paged), expected, strict=True):
        assert found_tokens == wanted_tokens
        assert found == pytest.approx(wanted, abs=CLOSE)


REFUSED = ("normalized_integer",)
cells = [(scheme, backend) for scheme in SCHEMES if scheme not in REFUSED for backend in ("sdpa", "eager")]


@pytest.mark.parametrize(
    ("scheme", "backend"),
    mostly_slow(cells, lambda cell: cell[0] in WAYS and (cell[1] == "sdpa" or cell[0] in ("t5", "pope"))),
)
def test_batches_equal_prompts_alone(scheme: str, backend: str) -> None:
    model = patched("llama_gqa", SCHEMES[scheme])
    model.set_attn_implementation(backend)
    assert_batches_equal_prompts_alone(model, prompts())


@pytest.mark.parametrize(
    ("architecture", "scheme", "backend"),
    [
        ("llama_gqa", YARN, "sdpa"),
        # A model without a rotary function maps keys on their way to the attention function.
        ("gpt2", "xpos", "sdpa"),
        ("gpt2", "forget_gate", "eager"),
        ("opt", "alibi", "sdpa"),
        # Every other layer has a window, whose keys are read from somewhere behind the first.
        ("mistral_sliding", "fire", "sdpa"),
        ("mistral_sliding", "forget_gate", "sdpa"),
        ("gemma3_two_rotaries", "t5", "eager"),
        ("gemma3_two_rotaries", "alibi", "sdpa"),
        # Rotations by a layer's input: before the cache, beside whole heads, and of features in it.
        ("llama_gqa", REPO, "sdpa"),
        ("llama_gqa", {"scheme": "composed", "parts": [REPO, {"scheme": "string"}]}, "sdpa"),
        ("llama_gqa", {"scheme": "selective_rope", "initial_std": 0.5, "gate": True, "theta": 100.0}, "sdpa"),
        # One layer writes narrower keys than the pages are, which another one needs.
        ("llama_gqa", {"scheme": "schedule", "layers": [{"scheme": "rope"}, {"scheme": "forget_gate"}]}, "sdpa"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["scheme"],
)
def test_other_layers_and_windows(architecture: str, scheme: Any, backend: str) -> None:
    model = patched(architecture, scheme)
    model.set_attn_implementation(backend)
    if architecture == "opt" and "cache.get_seq_length" in inspect.getsource(type(model.model.decoder)):
        pytest.skip("From transformers 5.24 on, OPT asks every cache for its length, and one with pages has none.")
    assert_batches_equal_prompts_alone(model, prompts())


@pytest.mark.parametrize("scheme", ["alibi", "forget_gate", "pope"])
def test_layers_with_and_without_a_window_read_the_same_keys_of_a_prompt(scheme: str) -> None:
    """The layer without a window comes first, and its information about the requests does not apply to the other."""
    model = patched("gemma3_two_rotaries", scheme, layer_types=["full_attention", "sliding_attention"])
    model.set_attn_implementation("sdpa")
    assert_batches_equal_prompts_alone(model, prompts()[1:3], max_batch_tokens=32)


@pytest.mark.parametrize("scheme", ["alibi", "forget_gate", "pope"])
def test_pages_that_requests_share_evict_and_copy(scheme: str) -> None:
    model, start = patched("llama_gqa", scheme), tokens(1, 16, 9)[0].tolist()
    # Prompts with a common beginning share pages.
    same = [start + tail for tail in ([5], [6, 7], [8, 9, 10], [5, 6, 7, 8], [])]
    assert_batches_equal_prompts_alone(model, same)
    # If the pages do not suffice for all requests, some lose their pages and start again.
    crowd = [tokens(1, 7, seed)[0].tolist() for seed in range(6)]
    assert_batches_equal_prompts_alone(model, crowd, num_blocks=6, safety_margin=0.0)
    copies = results_of(model, same[:2], SETTINGS | {"do_sample": True, "top_k": 1, "num_return_sequences": 2})
    # Transformers 5.17 returns one of them.
    found = {tuple(result.generated_tokens) for result in copies.values()}
    assert found == {tuple(alone(model, prompt)[0]) for prompt in same[:2]}


@pytest.mark.parametrize("scheme", ["forget_gate", "t5"])
def test_sixteen_bits_keep_what_a_bias_remembers(scheme: str) -> None:
    """Left-padded generation in the same dtype makes the same roundings, but for the order of sums."""
    model, given = patched("llama_gqa", scheme).to(torch.bfloat16), prompts()
    found = [values for _, values in batched(model, given)]
    wanted = [alone(model, prompt)[1] for prompt in given]
    # A step of bfloat16 at logits of about 4, for the first token; later ones may follow another token.
    assert [values[0] for values in found] == pytest.approx([values[0] for values in wanted], abs=2**-5)


@pytest.mark.parametrize("scheme", ["alibi", "forget_gate"])
def test_flash_kernels_attend_to_requests(scheme: str) -> None:
    """A stand-in that knows queries, keys, values, a scale and which keys are padding."""
    from transformers import AttentionInterface

    def visible(queries: int, keys: int, mask: Any) -> torch.Tensor:
        seen = causal(queries, keys)
        return seen if mask is None else seen & mask[:, None, None].bool()

    model = patched("llama_gqa", scheme)
    expected = [alone(model, prompt)[1][0] for prompt in prompts()]
    AttentionInterface.register("flash_attention_for_tests", flash_kernel(visible))
    model.config._attn_implementation = "flash_attention_for_tests"
    # As continuous batching hands them to such a model. The last token of each prompt comes in a second call.
    pages, lengths = _Pages(), torch.tensor([len(prompt) for prompt in prompts()])
    in_one_row(model, pages, [prompt[:-1] for prompt in prompts()], torch.zeros_like(lengths))
    found = in_one_row(model, pages, [prompt[-1:] for prompt in prompts()], lengths - 1)
    assert found[0].log_softmax(-1).amax(-1).tolist() == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def in_one_row(model: Any, pages: Any, given: list[list[int]], cached: torch.Tensor) -> torch.Tensor:
    """The logits of tokens of several requests, some tokens of which are cached."""
    lengths = torch.tensor([len(prompt) for prompt in given])
    starts = [range(int(start), int(start) + len(prompt)) for start, prompt in zip(cached, given, strict=True)]
    return model(
        torch.tensor([[token for prompt in given for token in prompt]]),
        position_ids=torch.tensor([[place for places in starts for place in places]]),
        use_cache=False,
        cache=pages,
        read_index=[],
        cu_seq_lens_q=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        cu_seq_lens_k={"full_attention": torch.nn.functional.pad((cached + lengths).cumsum(0), (1, 0)).int()},
    ).logits


class _Pages:
    """A cache that keeps the keys of every request of one row."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Any]] = {}

    def get_seq_length(self) -> None:
        """Every request has its own."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, kwargs: Any) -> Any:
        new = kwargs["cu_seq_lens_q"].diff().tolist()
        found = []
        for index, states in enumerate((key_states, value_states)):
            parts = list(states.split(new, dim=2))
            before = self.kept.setdefault(layer_idx, [None, None])[index]
            parts = parts if before is None else [torch.cat(both, dim=2) for both in zip(before, parts, strict=True)]
            self.kept[layer_idx][index] = parts
            found.append(torch.cat(parts, dim=2))
        return tuple(found)


ARGUMENTS: dict[str, Any] = {"generation_config": GenerationConfig(**SETTINGS, eos_token_id=-1)}


def test_what_pages_cannot_serve_is_refused_before_any_thread_starts() -> None:
    model, before = patched("llama_gqa", NTK), copy.deepcopy(ARGUMENTS)
    implementation = model.config._attn_implementation
    for call in (
        lambda one: one.generate_batch([[5, 6, 7]], **ARGUMENTS),
        lambda one: one.init_continuous_batching(**ARGUMENTS),
        lambda one: one.continuous_batching_context_manager(**ARGUMENTS).__enter__(),
        lambda one: one.generate(torch.tensor([[5, 6, 7]]), cache_implementation="paged"),
        lambda one: copy.deepcopy(one).generate_batch([[5, 6, 7]], **ARGUMENTS),
    ):
        with pytest.raises(UnsupportedError, match="Continuous batching cannot run the scheme") as refusal:
            call(model)
        assert "paged keys are never recomputed" in str(refusal.value)
        assert "Use model.generate() with a left-padded batch." in str(refusal.value)
    assert model.config._attn_implementation == implementation
    assert ARGUMENTS["generation_config"].to_dict() == before["generation_config"].to_dict()


@pytest.mark.parametrize(
    "asked",
    [{"use_cuda_graph": True}, {"varlen_compile_config": CompileConfig()}, {"default_compile_level": 1}],
    ids=lambda asked: next(iter(asked)),
)
def test_graphs_that_cannot_know_the_requests_are_refused(asked: dict[str, Any]) -> None:
    settings = ContinuousBatchingConfig(**PAGED, **asked)
    for scheme in ("alibi", "pope"):
        with pytest.raises(UnsupportedError, match=next(iter(asked))):
            patched("llama_gqa", scheme).init_continuous_batching(**ARGUMENTS, continuous_batching_config=settings)
    # A rotation reads positions only.
    patched("llama_gqa", "rope").init_continuous_batching(**ARGUMENTS, continuous_batching_config=settings)


def test_settings_of_the_caller_stay_as_they_are() -> None:
    settings = ContinuousBatchingConfig(**PAGED)
    before = copy.deepcopy(settings)
    patched("llama_gqa", "t5").init_continuous_batching(ARGUMENTS["generation_config"], settings)
    assert settings == before


@pytest.mark.parametrize("scheme", ["t5", "cope", ["alibi", "ssmax"]], ids=str)
def test_biases_that_no_flash_kernel_takes_are_refused(scheme: Any) -> None:
    model = patched("llama_gqa", scheme)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match=r'cannot be folded .*\.set_attn_implementation\("sdpa"\)'):
        model.init_continuous_batching(**ARGUMENTS)


def test_prompts_beyond_the_last_position_are_refused() -> None:
    model = patched("llama_gqa", {"scheme": "learned", "num_positions": 12})
    # Five tokens are generated.
    assert_batches_equal_prompts_alone(model, [[5] * 7])
    with pytest.raises(SequenceLengthError, match="12"):
        model.generate_batch([[5] * 8], **ARGUMENTS)


def test_a_manager_that_is_kept_does_not_outlive_its_scheme() -> None:
    def kept(model: Any, prompt: list[int]) -> list[int]:
        found: list[int] = next(iter(results_of(model, [prompt], kept=True).values())).generated_tokens
        return found

    model, prompt = patched("llama_gqa", None), prompts()[3]
    stock = kept(model, prompt)
    for scheme in ("forget_gate", "none", "pope"):
        patch_model(model, scheme)
        assert kept(model, prompt) == kept(model, prompt) == alone(model, prompt)[0]
    unpatch_model(model)
    assert kept(model, prompt) == stock
    model.destroy_cached_continuous_batching_manager()
