"""Words that stand for options, schemes, layers and models."""

import pytest

from hf_posenc.cli.catalogue import parse_layers
from hf_posenc.errors import UsageError
from hf_posenc.loading import model_class
from hf_posenc.schemes import (
    AlibiConfig,
    ComposedConfig,
    NativeConfig,
    RopeConfig,
    YarnScaling,
)
from hf_posenc.schemes.registry import as_scheme, parse_options, parse_scheme, parse_value


class TestOptions:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("5e5", 5e5), ("500_000", 500_000), ("-1", -1), ("true", True), ("False", False), ("none", None),
            ("null", None), ("half", "half"), ("[1, 2]", [1, 2]), ('{"type": "yarn"}', {"type": "yarn"}),
        ],
    )  # fmt: skip
    def test_values(self, text, value):
        assert parse_value(text) == value
        assert type(parse_value(text)) is type(value)

    @pytest.mark.parametrize(
        ("parse", "words", "message"),
        [
            (parse_value, ["{type: yarn}"], "looks like JSON"),
            *((parse_options, [[pair]], "name=value") for pair in ("theta", "=5", "")),
            (parse_scheme, ["rope:theta=1e4", ["theta=2e4"]], "'theta' is given twice"),
            (parse_scheme, ["[rope,alibi]"], "single quotes"),
        ],
    )
    def test_words_that_say_nothing_usable_are_refused(self, parse, words, message):
        with pytest.raises(UsageError, match=message):
            parse(*words)

    def test_schemes_with_options(self):
        scaling = 'scaling={"type": "yarn", "factor": 4.0, "original_max_positions": 64}'
        expected = RopeConfig(theta=5e5, scaling=YarnScaling(factor=4.0, original_max_positions=64))
        assert parse_scheme("rope", ["theta=5e5", scaling]) == expected
        assert parse_scheme(f"rope:{scaling},theta=5e5") == expected
        assert parse_scheme("rope") == RopeConfig()

    def test_schemes_inside_schemes(self):
        both = ComposedConfig((RopeConfig(), AlibiConfig()))
        assert parse_scheme('composed:parts=["rope","alibi"]') == both
        assert parse_scheme('["rope", "alibi"]') == as_scheme('["rope", "alibi"]') == both
        assert parse_scheme('self_extend:inner=["rope","alibi"],group=4').inner == both
        assert parse_scheme("self_extend:inner=native").inner == NativeConfig()

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("strength=1", 1.0), ("strength=none", None), ("strength=0.5", 0.5), ("rows=7", 7),
            ("weights=[1, 2]", (1.0, 2.0)), ("switch=true", True), ("word=1", "1"), ("word=none", "none"),
        ],
    )  # fmt: skip
    def test_values_get_the_type_of_the_option(self, typed_options, text, value):
        name = text.partition("=")[0]
        parsed = getattr(parse_scheme("typed_options", [text]), name)
        assert parsed == value
        assert type(parsed) is type(value)
        if isinstance(value, tuple):
            assert [type(item) for item in parsed] == [type(item) for item in value]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("rows=1.0", "TypedOptions.rows is 1.0; expected an integer"),
            ("rows=true", "expected an integer"),
            ("rows=none", "expected an integer"),
            ("strength=much", "expected a finite number or None"),
            ("switch=1", "expected True or False"),
        ],
    )
    def test_values_of_another_type_are_refused(self, typed_options, text, expected):
        with pytest.raises(UsageError, match=expected):
            parse_scheme("typed_options", [text])

    def test_numbers_of_nested_options_get_their_types_too(self):
        scaling = parse_scheme('rope:scaling={"type": "linear", "factor": 4}').scaling
        assert type(scaling.factor) is float
        inner = parse_scheme('self_extend:inner={"scheme": "rope", "theta": 500000}').inner
        assert type(inner.theta) is float

    def test_layers(self):
        assert parse_layers("0,2,5") == [0, 2, 5]
        assert parse_layers("0-2,7") == [0, 1, 2, 7]

    @pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "-1"])
    def test_other_layers_are_refused(self, text):
        with pytest.raises(UsageError):
            parse_layers(text)


class TestLoading:
    @pytest.mark.parametrize(
        ("architecture", "expected"),
        [
            ("LlamaForCausalLM", "LlamaForCausalLM"),
            ("hf_posenc.BertForMaskedLM", "BertForMaskedLM"),
            (None, "AutoModel"),
        ],
    )
    def test_the_class_keeps_the_head(self, architecture, expected):
        from transformers import PreTrainedConfig

        assert model_class(PreTrainedConfig(architectures=architecture and [architecture])).__name__ == expected

    def test_an_architecture_that_would_lose_its_head_is_refused(self):
        from transformers import PreTrainedConfig

        for name in ("MyModel", "Trainer", "AutoModel"):
            with pytest.raises(UsageError, match=f"transformers has no model '{name}'"):
                model_class(PreTrainedConfig(architectures=[name]))
