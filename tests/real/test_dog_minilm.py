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


def test_the_published_form_holds_on_the_embeddings_of_a_pretrained_model(result):
    assert result.probe_without_positions == 0.0
    assert [result.tokens[index] for index in result.first + result.second] == ["dog", "dog"]
    for row in result.rows:
        if row.scheme in CAUSAL:
            assert row.probe is None
        else:
            assert (row.probe == 0.0) == (row.scheme in {"none", *SCALES})


def test_exactly_the_invisible_schemes_leave_the_dogs_identical(result):
    assert {row.scheme for row in result.rows if row.identical} == INVISIBLE
    for name in INVISIBLE - {"none", *SCALES}:
        assert any("LayerNorm" in note for note in result.row(name).notes)


def test_what_positions_do_is_far_above_rounding(result):
    for row in result.rows:
        if row.scheme in CAUSAL:
            continue
        largest = max(distance.relative_l2 for distance in row.layers)
        assert largest <= 1e-5 if row.scheme in INVISIBLE else largest >= 1e-3


def test_every_scheme_is_placed_or_says_why_not(result):
    assert {row.scheme for row in result.rows if row.error} == CAUSAL
    assert all("bidirectional" in row.error for row in result.rows if row.error)
