import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from hf_posenc.cli import main
from hf_posenc.cli.errors import UsageError
from hf_posenc.cli.loading import auto_class
from hf_posenc.cli.options import parse_layers, parse_options, parse_scheme, parse_value
from hf_posenc.schemes import (
    AlibiConfig,
    ComposedConfig,
    NativeConfig,
    RopeConfig,
    SchemeConfig,
    YarnScaling,
    registry,
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "dog", "chased", "another", "cat"]


def save_tokenizer(folder):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def third_party(monkeypatch):
    """A registered scheme that has no default options."""

    @dataclass(frozen=True)
    class ThirdParty(SchemeConfig):
        """Positions of one's own."""

        name: ClassVar[str] = "third_party"
        strength: float

    monkeypatch.setitem(registry._SCHEMES, "third_party", ThirdParty)


def refused(capsys, *words):
    """Runs a command that must be refused, and returns the one line that says why."""
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    # Progress bars may come before.
    lines = [line for line in captured.err.splitlines() if line and "it/s]" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("hf-posenc: error: ")
    return lines[0]


def logits(folder):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.tensor([[4, 5, 6, 7, 5]])).logits


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

    def test_broken_json_is_not_taken_for_text(self):
        with pytest.raises(UsageError, match="looks like JSON"):
            parse_value("{type: yarn}")

    @pytest.mark.parametrize("pair", ["theta", "=5", ""])
    def test_a_word_without_a_value_is_refused(self, pair):
        with pytest.raises(UsageError, match="name=value"):
            parse_options([pair])

    def test_an_option_given_twice_is_refused(self):
        with pytest.raises(UsageError, match="'theta' is given twice"):
            parse_scheme("rope:theta=1e4", ["theta=2e4"])

    def test_schemes_with_options(self):
        scaling = 'scaling={"type": "yarn", "factor": 4.0, "original_max_positions": 64}'
        expected = RopeConfig(theta=5e5, scaling=YarnScaling(factor=4.0, original_max_positions=64))
        assert parse_scheme("rope", ["theta=5e5", scaling]) == expected
        assert parse_scheme(f"rope:{scaling},theta=5e5") == expected
        assert parse_scheme("rope") == RopeConfig()

    def test_schemes_inside_schemes(self):
        both = ComposedConfig((RopeConfig(), AlibiConfig()))
        assert parse_scheme('composed:parts=["rope","alibi"]') == both
        assert parse_scheme('self_extend:inner=["rope","alibi"],group=4').inner == both
        assert parse_scheme("self_extend:inner=native").inner == NativeConfig()

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
            ("LlamaForCausalLM", "AutoModelForCausalLM"),
            ("GPT2LMHeadModel", "AutoModelForCausalLM"),
            ("BertForMaskedLM", "AutoModelForMaskedLM"),
            ("BertModel", "AutoModel"),
            ("hf_posenc.BertForMaskedLM", "AutoModelForMaskedLM"),
            ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
            ("BertForSequenceClassification", "AutoModelForSequenceClassification"),
            (None, "AutoModel"),
        ],
    )
    def test_the_auto_class_keeps_the_head(self, architecture, expected):
        from transformers import PreTrainedConfig

        assert auto_class(PreTrainedConfig(architectures=architecture and [architecture])).__name__ == expected

    def test_an_architecture_that_would_lose_its_head_is_refused(self):
        from transformers import PreTrainedConfig

        with pytest.raises(UsageError, match="No Auto class of transformers loads the architecture 'MyModel'"):
            auto_class(PreTrainedConfig(architectures=["MyModel"]))


class TestSchemes:
    def test_the_table_names_schemes_summaries_and_defaults(self, capsys, third_party):
        assert main(["schemes"]) == 0
        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
        assert "rotat" in lines["rope"].lower()
        assert "theta=10000.0" in lines["p_rope"]
        assert "strength=required" in lines["third_party"]

    def test_arrangements_follow_and_nested_schemes_are_names(self, capsys):
        assert main(["schemes"]) == 0
        schemes, arrangements = capsys.readouterr().out.split("\narrangement ")
        names = [line.split()[0] for line in arrangements.splitlines()[2:] if line]
        assert {"composed", "interleaved", "local_global", "schedule"} <= set(names)
        lines = {line.split()[0]: line for line in (schemes + arrangements).splitlines() if line}
        assert "interleaved" not in schemes.split()
        assert "inner=rope  group=8" in lines["self_extend"]
        assert "inner=rope  other=none  every=4" in lines["interleaved"]

    def test_one_scheme_in_detail(self, capsys):
        assert main(["schemes", "kerple", "interleaved"]) == 0
        kerple, interleaved = capsys.readouterr().out.split("\n\ninterleaved\n")
        assert kerple.splitlines()[0] == "kerple"
        assert "KERPLE, arXiv:2205.09921" in kerple.splitlines()[1]
        rows = [" ".join(line.split()) for line in kerple.splitlines()]
        assert {"option type default", "variant str log", "exponent float | None None"} <= set(rows)
        assert "inner SchemeConfig rope" in [" ".join(line.split()) for line in interleaved.splitlines()]

    def test_details_of_schemes_without_options_and_without_defaults(self, capsys, third_party):
        assert main(["schemes", "none", "third_party"]) == 0
        printed = capsys.readouterr().out
        assert "It has no options." in printed
        assert "strength  float  required" in printed

    def test_an_unknown_scheme(self, capsys):
        assert "Did you mean 'kerple'" in refused(capsys, "schemes", "kerpel")

    def test_json(self, capsys):
        import hf_posenc

        assert main(["schemes", "--json"]) == 0
        entries = json.loads(capsys.readouterr().out)
        names = hf_posenc.list_schemes()
        assert [entry["name"] for entry in entries if not entry["arrangement"]] == names
        assert [entry["name"] for entry in entries][: len(names)] == names
        assert all(entry["summary"] for entry in entries)
        assert main(["schemes", "rope", "--json"]) == 0
        assert [entry["options"]["theta"] for entry in json.loads(capsys.readouterr().out)] == [1e4]


THIRD_PARTY = """
from dataclasses import dataclass
from typing import ClassVar
from hf_posenc import NoneConfig, SchemeConfig, register_scheme

@register_scheme
@dataclass(frozen=True)
class FarConfig(SchemeConfig):
    "Positions of somebody else."
    name: ClassVar[str] = "far_for_tests"
"""


class TestImport:
    @pytest.fixture
    def module(self, tmp_path, monkeypatch):
        monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.chdir(tmp_path)
        (tmp_path / "far_schemes.py").write_text(THIRD_PARTY)
        yield "far_schemes"
        sys.modules.pop("far_schemes", None)

    def test_a_module_of_this_folder_registers_its_schemes(self, capsys, module):
        assert "far_for_tests" in refused(capsys, "schemes", "far_for_tests")
        assert main(["--import", "json", f"--import={module}", "schemes", "far_for_tests"]) == 0
        assert "Positions of somebody else." in capsys.readouterr().out

    def test_a_module_that_does_not_exist(self, capsys):
        assert "no module 'nowhere_to_be_found'" in refused(capsys, "--import", "nowhere_to_be_found", "schemes")

    def test_what_a_module_itself_lacks_keeps_its_traceback(self, module):
        Path(f"{module}.py").write_text("import nowhere_to_be_found")
        with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
            main(["--import", module, "schemes"])

    def test_compare_runs_elsewhere(self, capsys):
        assert "process of its own" in refused(capsys, "--import", "json", "compare", "--schemes", "none")


class TestInspect:
    def test_prints_what_the_library_says(self, capsys, bert):
        from transformers import AutoModelForMaskedLM

        import hf_posenc

        assert main(["inspect", bert]) == 0
        printed = capsys.readouterr().out
        assert printed.strip() == str(hf_posenc.inspect_model(AutoModelForMaskedLM.from_pretrained(bert))).strip()

    def test_a_config_is_enough(self, capsys, bert, tmp_path):
        (tmp_path / "config.json").write_text((Path(bert) / "config.json").read_text())
        assert main(["inspect", str(tmp_path), "--config-only"]) == 0
        assert "position_embeddings" in capsys.readouterr().out
        assert "cannot load" in refused(capsys, "inspect", str(tmp_path))

    def test_a_folder_without_a_model(self, capsys, tmp_path):
        assert "cannot load" in refused(capsys, "inspect", str(tmp_path))


class TestPatch:
    def test_the_patched_model_is_saved_with_its_tokenizer(self, capsys, bert, tmp_path):
        from transformers import AutoModelForMaskedLM, AutoTokenizer

        assert main(["patch", bert, "alibi", "--output", str(tmp_path)]) == 0
        assert "alibi" in capsys.readouterr().out
        model = AutoModelForMaskedLM.from_pretrained(tmp_path)
        assert model.position_encoding.config.name == "alibi"
        assert AutoTokenizer.from_pretrained(tmp_path)("the dog")["input_ids"] == [4, 5]

    def test_options_reach_the_scheme(self, llama, tmp_path, capsys):
        from transformers import AutoModelForCausalLM

        words = ["--option", "theta=77", "fraction=0.5", "--output", str(tmp_path)]
        assert main(["patch", llama, "p_rope", *words]) == 0
        config = AutoModelForCausalLM.from_pretrained(tmp_path).position_encoding.config
        assert (config.theta, config.fraction) == (77, 0.5)
        assert "without a tokenizer" in capsys.readouterr().err

    def test_layers_get_schemes_of_their_own(self, llama, tmp_path):
        from transformers import AutoModelForCausalLM

        import hf_posenc

        words = ["--layers", "0,1", "--elsewhere", "none", "--output", str(tmp_path)]
        assert main(["patch", llama, "rope:theta=300", *words]) == 0
        expected = AutoModelForCausalLM.from_pretrained(llama).eval()
        hf_posenc.patch_model(expected, "rope", theta=300, layers=[0, 1], elsewhere="none")
        with torch.no_grad():
            assert torch.equal(logits(tmp_path), expected(torch.tensor([[4, 5, 6, 7, 5]])).logits)

    def test_a_stock_checkpoint_needs_no_plugin(self, llama, tmp_path):
        assert main(["patch", llama, "rope:theta=300", "--stock", "--output", str(tmp_path)]) == 0
        entry = json.loads((tmp_path / "config.json").read_text())
        assert entry["model_type"] == "llama"
        assert "position_encoding" not in entry
        assert not torch.equal(logits(tmp_path), logits(llama))

    def test_a_scheme_that_stock_transformers_cannot_say(self, capsys, llama, tmp_path):
        output = tmp_path / "new"
        assert main(["patch", llama, "alibi", "--stock", "--output", str(output)]) == 2
        assert "hf-posenc: error: " in capsys.readouterr().err.splitlines()[-1]
        assert not output.exists()

    def test_a_full_folder_is_kept_unless_told_otherwise(self, capsys, llama, tmp_path):
        (tmp_path / "precious.txt").write_text("mine")
        assert "not empty" in refused(capsys, "patch", llama, "none", "--output", str(tmp_path))
        assert [file.name for file in tmp_path.iterdir()] == ["precious.txt"]
        assert main(["patch", llama, "none", "--output", str(tmp_path), "--overwrite"]) == 0
        assert (tmp_path / "config.json").is_file()
        assert (tmp_path / "precious.txt").read_text() == "mine"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["alibbi"], "Did you mean 'alibi'"),
            (["rope", "--option", "thetta=5"], "Did you mean 'theta'"),
            (["rope", "--option", "theta=-5"], "theta"),
            (["composed"], "parts"),
            (['composed:parts=["rope","p_rope"]'], "map queries and keys"),
            (["rope:scaling=yarn"], "YarnScaling(factor=..."),
            (["rope", "--elsewhere", "none"], "give --layers too"),
            (["rope", "--layers", "0,99", "--elsewhere", "none"], "99"),
        ],
    )
    def test_bad_requests_write_nothing(self, capsys, llama, tmp_path, words, message):
        output = tmp_path / "new"
        assert message in refused(capsys, "patch", llama, *words, "--output", str(output))
        assert not output.exists()

    def test_a_file_is_not_a_folder(self, capsys, llama, tmp_path):
        (tmp_path / "file").write_text("")
        assert "is a file" in refused(capsys, "patch", llama, "none", "--output", str(tmp_path / "file"))


class TestEvalDog:
    def test_the_table(self, capsys, bert):
        assert main(["eval", "dog", bert, "--schemes", "native", "none", "alibi"]) == 0
        rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
        assert rows["native"][-1] == "yes"
        assert rows["none"][-1] == "no"
        assert rows["alibi"][-1] == "yes"

    def test_json_holds_the_same_as_the_function_returns(self, capsys, bert):
        from transformers import AutoModelForMaskedLM, AutoTokenizer

        from hf_posenc.metrics import dog_test
        from hf_posenc.schemes import IntegerConfig

        words = ["--schemes", "integer:direction=one_hot", "--sentence", "the cat chased the cat", "--word", "cat"]
        assert main(["eval", "dog", bert, *words, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        expected = dog_test(
            AutoModelForMaskedLM.from_pretrained(bert),
            AutoTokenizer.from_pretrained(bert),
            [IntegerConfig(direction="one_hot")],
            "the cat chased the cat",
            "cat",
        )
        assert printed == json.loads(json.dumps(expected.to_dict()))

    def test_all_schemes(self, capsys, bert, third_party):
        import hf_posenc

        assert main(["eval", "dog", bert, "--schemes", "all", "--json"]) == 0
        names = [row["scheme"] for row in json.loads(capsys.readouterr().out)["rows"]]
        assert names[0] == "native"
        assert set(hf_posenc.list_schemes()) - set(names) == {"third_party"}

    def test_the_plot(self, bert, tmp_path):
        pytest.importorskip("matplotlib")
        assert main(["eval", "dog", bert, "--plot", str(tmp_path / "dog.svg")]) == 0
        assert (tmp_path / "dog.svg").read_text().lstrip().startswith("<?xml")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--schemes", "alibbi"], "Did you mean 'alibi'"),
            (["--sentence", "one dog only"], "twice"),
            (["--plot", "no/such/folder/dog.png"], "does not exist"),
        ],
    )
    def test_bad_requests(self, capsys, bert, words, message):
        assert message in refused(capsys, "eval", "dog", bert, *words)

    def test_a_model_without_a_tokenizer(self, capsys, llama, bert):
        assert "AutoTokenizer cannot load" in refused(capsys, "eval", "dog", llama)
        assert main(["eval", "dog", llama, "--tokenizer", bert]) == 0
        assert "the mask alone" in capsys.readouterr().out


class TestCompare:
    def test_the_script_gets_its_arguments_untouched(self, tmp_path, monkeypatch):
        (tmp_path / "training").mkdir()
        (tmp_path / "training" / "compare.py").write_text(
            "import json, sys\nopen('seen.json', 'w').write(json.dumps(sys.argv[1:]))\nsys.exit(7)\n"
        )
        monkeypatch.chdir(tmp_path)
        assert main(["compare", "--schemes", "none", "--", "--help"]) == 7
        assert json.loads((tmp_path / "seen.json").read_text()) == ["--schemes", "none", "--", "--help"]

    def test_without_the_repository_the_error_teaches(self, capsys, tmp_path, monkeypatch):
        import hf_posenc.cli

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(hf_posenc.cli, "__file__", str(tmp_path / "site" / "hf_posenc" / "cli" / "__init__.py"))
        assert "clone the repository" in refused(capsys, "compare")


class TestProcess:
    def test_errors_and_status_in_a_process_of_its_own(self, tmp_path):
        root = Path(__file__).parents[1]
        command = [sys.executable, "-m", "hf_posenc.cli", "patch", "nowhere", "alibbi", "--output", str(tmp_path / "x")]
        environment = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
        assert done.returncode == 2
        assert "Did you mean 'alibi'" in done.stderr
        assert "Traceback" not in done.stderr

    def test_an_unexpected_exception_keeps_its_traceback(self, monkeypatch):
        from hf_posenc.cli import listing

        monkeypatch.setattr(listing, "schemes", lambda options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["schemes"])

    @pytest.mark.parametrize("words", [[], ["eval"], ["nonsense"], ["patch", "model", "rope"]])
    def test_incomplete_commands_show_the_usage(self, capsys, words):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert "usage: hf-posenc" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "usage"),
        [
            (["plot", "ssmax", "pope"], "usage: hf-posenc plot "),
            (["schemes", "--jsno"], "usage: hf-posenc schemes "),
            (["eval", "properties", "--scheme", "rope", "--nonsense"], "usage: hf-posenc eval properties "),
        ],
    )
    def test_a_word_too_many_shows_the_usage_of_the_verb(self, capsys, words, usage):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        printed = capsys.readouterr().err
        assert usage in printed
        assert f"unrecognized arguments: {words[-1]}" in printed

    def test_a_reader_that_goes_away_ends_it_quietly(self):
        command = [sys.executable, "-c", "import sys; from hf_posenc.cli import main; sys.exit(main(['schemes']))"]
        read, write = os.pipe()
        os.close(read)
        with open(write, "w") as pipe:
            done = subprocess.run(
                command, stdout=pipe, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1], check=False
            )
        assert done.stderr == ""
        assert done.returncode == 1

    def test_other_broken_pipes_keep_their_traceback(self, monkeypatch):
        from hf_posenc.cli import listing

        def broken(options):
            raise BrokenPipeError("of something else")

        monkeypatch.setattr(listing, "schemes", broken)
        with pytest.raises(BrokenPipeError, match="something else"):
            main(["schemes"])
