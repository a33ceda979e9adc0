"""The expected marks of every scheme, specimens, and the table in all forms."""

import pytest
import torch

from hf_posenc.metrics import MeasurementError
from hf_posenc.metrics.properties import (
    build_specimen,
    determinism,
    long_term_decay,
    properties_table,
    specimen_forms,
    uniqueness,
)
from hf_posenc.metrics.properties.table import PROPERTIES
from hf_posenc.schemes import AlibiConfig, FireConfig, LearnedConfig, get_scheme, list_schemes
from tests.schemes.table import TABLE
from tests.thinning import mostly_slow

MARKS = {True: "+", False: "-", None: "."}
#: A network of another width has the same properties, in a tenth of the time.
SMALLER = {"log_cpb": {"width": 32}}
#: The first scheme with each set of marks; the default run takes these.
FIRST = list({(row.marks, row.causal_marks): name for name, row in reversed(TABLE.items())}.values())


@pytest.mark.parametrize("name", mostly_slow(list_schemes(), FIRST.__contains__))
def test_marks_are_the_expected_ones(name):
    config, causal_marks = get_scheme(name)(**SMALLER.get(name, {})), TABLE[name].causal_marks
    result = properties_table([config])
    expected = {f"{config.label} (causal)": causal_marks, f"{config.label} (bidirectional)": TABLE[name].marks}
    if not causal_marks:
        expected = {config.label: TABLE[name].marks}
    assert result.labels == list(expected)
    for subject in result.subjects:
        assert subject.error is None
        _, *records = result.of(subject.label)
        assert [record.quantity for record in records] == list(PROPERTIES)
        found = "".join(MARKS[record.passed] for record in records)
        assert found == expected[subject.label], {record.quantity: record.value for record in records}
        for record in records:
            # Every verdict has a number and a threshold, or says why there is none.
            assert (record.passed is None) == ("reason" in record.details)
            assert record.passed is None or record.value is not None or record.shown or record.details["refused"]


def test_specimens_draw_small_weights_anew_and_leave_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    specimen = build_specimen("t5")
    uniqueness(specimen), determinism(specimen), long_term_decay(specimen)
    assert torch.equal(torch.rand(3), expected)
    assert specimen.redrawn == ("T5Bias.weight",)
    weight = specimen.parts.logit_bias.weight
    assert 0.2 < float(weight.std()) < 0.3
    assert torch.equal(weight, build_specimen("t5").parts.logit_bias.weight)
    assert not torch.equal(weight, build_specimen("t5", seed=1).parts.logit_bias.weight)
    assert build_specimen("rope").redrawn == ()


def test_a_causal_model_is_measured_by_itself_where_it_has_another_function():
    causal, bidirectional = specimen_forms("fire")
    assert (causal.causal, bidirectional.causal) == (True, False)
    # Another function with the same weights: nothing but the form differs between the two rows.
    for name, parameter in causal.parts.logit_bias.named_parameters():
        assert torch.equal(parameter, bidirectional.parts.logit_bias.get_parameter(name))
    assert [form.causal for form in specimen_forms("xpos")] == [True]
    for one_form in ("alibi", AlibiConfig("asymmetric"), FireConfig(initial_threshold=1e6)):
        assert [form.causal for form in specimen_forms(one_form)] == [False]
    # All weights that a learned curve is drawn with are those of the form that was asked for.
    assert long_term_decay(build_specimen("t5", causal=True)).value != long_term_decay("t5").value
    with pytest.raises(MeasurementError, match="bidirectional"):
        build_specimen("forget_gate", causal=False)


def test_a_table_too_short_for_any_property_has_a_row_of_refusals():
    result = properties_table([LearnedConfig(num_positions=8)])
    refused = {record.quantity: record for record in result.records if "refused" in record.details}
    assert set(refused) == set(PROPERTIES) - {"extensibility", "norm_preservation"}
    assert len({meaning for _, _, meaning in PROPERTIES.values()}) == len(PROPERTIES)
    assert all(record.passed is None for record in refused.values())
    assert all("8 positions of the learned table" in record.details["refused"][0] for record in refused.values())
