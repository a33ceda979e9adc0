"""The architectures of transformers under every scheme: a cross-section by default, all of them with `-m slow`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_posenc import UnsupportedError, patch_model
from tests.thinning import mostly_slow

from .calling import Caller
from .checks import Checker, check_pair, stir
from .examination import examine, unbuilt_reason
from .findings import SAME_BOUND, Record
from .heads import refusals
from .population import default_pairs, known_model_types, pair_named, pairs_of

#: One architecture for each way of using positions, of attention, and of tensor layout. Most of those in
#: `tests/matrix` are not here.
CROSS_SECTION = [
    "causal-llama",
    "causal-mpt",
    "causal-codegen",
    "causal-gemma4_text",
    "causal-deepseek_v2",
    "causal-gpt_oss",
    "causal-phi3",
    "causal-ctrl",
    "causal-beam",
    "causal-nanochat",
    "causal-falcon",
    "masked-bert",
    "masked-roformer",
    "masked-mpnet",
    "masked-deberta",
    "masked-deberta[relative]",
    "masked-deberta-v2[relative]",
    "masked-squeezebert",
    "seq2seq-t5",
    "seq2seq-m2m_100",
    "encoder-t5",
]
#: Own mechanisms that no scheme of the library describes: `native_scheme` says so.
WITHOUT_NATIVE = {"causal-xlnet"}
#: CPM-Ant puts 32 prompt tokens in front of left padding, so distances between prompt and text count padding.
KNOWN_FAILURES = {"causal-cpmant": {"left padding"}}
#: One architecture for each way of reading pictures, sound and series that is cheap to check.
PARTS = ["vision-vit", "image-text-llava", "audio-text-whisper"]
#: Model types of text each of whose classes is patched.
ANY_CLASS = ("t5", "bart", "bert", "llama")


def assert_holds(record: Record) -> None:
    known = KNOWN_FAILURES.get(record.pair, set())
    failed = {
        f"{scheme}: {name}": (record.findings[scheme][name].value, record.findings[scheme][name].note)
        for scheme in record.findings
        for name in record.failed(scheme)
        if name not in known
    }
    assert not failed
    assert record.findings


@pytest.mark.parametrize("name", [*CROSS_SECTION, *PARTS, *WITHOUT_NATIVE])
def test_every_check_holds(name: str) -> None:
    for record in check_pair(pair_named(name)):
        assert not record.refusal
        assert_holds(record)
        patched = record.findings["native"].get("patch")
        assert (patched is not None and patched.verdict == "refused") == (name in WITHOUT_NATIVE)


@pytest.mark.parametrize(
    "name",
    ["causal-mamba", "masked-reformer", "masked-funnel", "causal-deepseek_v32", "vision-swiftformer"],
)
def test_refusals_name_the_reason_and_leave_no_trace(name: str) -> None:
    (record,) = check_pair(pair_named(name))
    assert len(record.refusal) > 40
    assert_holds(record)


def test_rounding_is_told_from_an_error() -> None:
    checker = Checker(Caller(pair_named("causal-llama")))
    checker.scale = 1.0

    def judge(way: Callable[[Caller], torch.Tensor]) -> str:
        return checker._same(way, checker.caller.logits(), whole=lambda caller: caller.logits()).verdict

    assert judge(lambda caller: caller.logits() + 2e-4) == "fail"
    assert judge(lambda caller: caller.logits() + 2e-4 * (caller.model.dtype == torch.float32)) == "pass"


def test_a_model_without_attention_is_told_apart() -> None:
    (record,) = examine(pair_named("vision-resnet"))
    assert record.without == "convolution"


#: Models with numbers that are made outside of the meta device, and with weights that are stored under other names.
SAVED_IN_ANOTHER_WAY = ("causal-diffllama", "image-text-molmo2", "image-text-tipsv2")
#: Stock models that cannot be loaded, or have other outputs then.
NOT_LOADED = {
    *("causal-youtu", "text-diffusion_gemma", "text-embedding_gemma2_text", "audio-text-gradium_phonon_tts"),
    "audio-text-nemo_speechlm",
}


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [pair.name for pair in default_pairs() if pair.name not in NOT_LOADED], SAVED_IN_ANOTHER_WAY.__contains__
    ),
)
def test_a_saved_model_has_the_same_outputs(name: str, tmp_path: Path) -> None:
    pair = pair_named(name)
    if reason := unbuilt_reason(pair):
        pytest.skip(reason)
    caller = Caller(pair)
    try:
        patch_model(caller.model, "t5")
    except UnsupportedError as error:
        pytest.skip(str(error))
    stir(caller.model)
    with torch.no_grad():
        expected = caller.outputs()
        caller.model.save_pretrained(tmp_path)
        caller.model = type(caller.model).from_pretrained(tmp_path).eval()
        assert (caller.outputs() - expected).abs().max() <= SAME_BOUND


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["native", "alibi"])
@pytest.mark.parametrize("model_type", mostly_slow(known_model_types(), ANY_CLASS.__contains__))
def test_every_class_of_a_model_type_is_patched_or_none(model_type: str, scheme: str) -> None:
    """Position tables or rotations that `native_scheme` has no name for are a refusal of the scheme, not of a class."""
    refused = refusals(model_type, scheme)
    # The encoder of BigBird-Pegasus is sparse, and its class without one is not.
    assert len(set(map(bool, refused.values()))) <= 1 or model_type == "bigbird_pegasus", refused
    assert model_type not in ANY_CLASS or set(refused.values()) == {""}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", known_model_types())
def test_sweep(model_type: str) -> None:
    for pair in pairs_of(model_type):
        if pair.name in CROSS_SECTION or pair.name in WITHOUT_NATIVE:
            continue
        for record in examine(pair):
            if record.without or record.unbuilt or (record.refusal and not record.findings):
                continue
            assert_holds(record)
