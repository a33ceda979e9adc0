"""The dog test on a pretrained encoder, with every scheme."""

import pytest

from hf_posenc import list_schemes
from hf_posenc.metrics import dog_test
from tests.schemes.table import TABLE

pytestmark = pytest.mark.assets

#: A temperature tells tokens of one short sentence nothing in a bidirectional model.
SCALES = {"ssmax", "log_n_scale", "llama4_scale"}
INVISIBLE = {"none", "integer", "normalized_integer", *SCALES}
CAUSAL = {name for name, row in TABLE.items() if row.causal_only}


@pytest.fixture(scope="module")
def result(minilm_folder):
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(minilm_folder).eval()
    return dog_test(model, AutoTokenizer.from_pretrained(minilm_folder), ["native", *list_schemes()])


def schemes(result, quantity):
    """The schemes of which a verdict has passed."""
    return {
        subject.scheme
        for subject in result.subjects
        if not subject.error and result.record(subject.label, quantity).passed
    }


def test_the_published_form_holds_on_the_embeddings_of_a_pretrained_model(result):
    settings = result.settings["of_model"]
    assert settings["probe_without_positions"] == 0.0
    assert [settings["tokens"][index] for index in settings["first"] + settings["second"]] == ["dog", "dog"]
    for subject in result.subjects:
        if subject.scheme not in CAUSAL:
            assert (result.value(subject.label, "probe") == 0.0) == (subject.scheme in {"none", *SCALES})


def test_exactly_the_invisible_schemes_leave_the_dogs_identical(result):
    assert schemes(result, "identical") == INVISIBLE
    for name in INVISIBLE - {"none", *SCALES}:
        assert any("LayerNorm" in note for note in result.subject(name).notes)


def test_what_positions_do_is_far_above_rounding(result):
    for subject in result.subjects:
        if subject.scheme in CAUSAL:
            continue
        largest = max(record.value for record in result.of(subject.label, "relative_l2"))
        assert largest <= 1e-5 if subject.scheme in INVISIBLE else largest >= 1e-3


def test_every_scheme_is_placed_or_says_why_not(result):
    assert {subject.scheme for subject in result.subjects if subject.error} == CAUSAL
    assert all("bidirectional" in subject.error for subject in result.subjects if subject.error)
    assert {record.subject for record in result.records}.isdisjoint(CAUSAL)
