"""The dog test on a pretrained encoder, with every scheme."""

import pytest

from hf_posenc import list_schemes
from hf_posenc.metrics import dog_test

pytestmark = pytest.mark.assets

INVISIBLE = {"none", "integer", "normalized_integer"}


@pytest.fixture(scope="module")
def result(minilm_folder):
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(minilm_folder).eval()
    return dog_test(model, AutoTokenizer.from_pretrained(minilm_folder), ["native", *list_schemes()])


def test_the_published_form_holds_on_the_embeddings_of_a_pretrained_model(result):
    assert result.probe_without_positions == 0.0
    assert [result.tokens[index] for index in result.first + result.second] == ["dog", "dog"]
    for row in result.rows:
        assert (row.probe == 0.0) == (row.scheme == "none")


def test_exactly_the_invisible_schemes_leave_the_dogs_identical(result):
    assert {row.scheme for row in result.rows if row.identical} == INVISIBLE
    for name in INVISIBLE - {"none"}:
        assert any("LayerNorm" in note for note in result.row(name).notes)


def test_what_positions_do_is_far_above_rounding(result):
    for row in result.rows:
        largest = max(distance.relative_l2 for distance in row.layers)
        assert largest <= 1e-5 if row.scheme in INVISIBLE else largest >= 1e-3


def test_every_scheme_can_be_placed(result):
    assert {row.scheme: row.error for row in result.rows if row.error} == {}
