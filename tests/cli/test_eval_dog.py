"""`hf-posenc eval dog`."""

import json

import pytest

from hf_posenc.cli import main

from .running import refused


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
        names = [subject["scheme"] for subject in json.loads(capsys.readouterr().out)["subjects"]]
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
            (["--plot", "dog.xyz"], "figures end in"),
        ],
    )
    def test_bad_requests(self, capsys, bert, words, message):
        assert message in refused(capsys, "eval", "dog", bert, *words)

    def test_a_model_without_a_tokenizer(self, capsys, llama, bert):
        message = refused(capsys, "eval", "dog", llama)
        assert "name one with --tokenizer" in message
        assert "AutoTokenizer cannot load" in message
        assert main(["eval", "dog", llama, "--tokenizer", bert]) == 0
        assert "the mask alone" in capsys.readouterr().out
