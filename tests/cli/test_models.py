"""`hf-posenc inspect` and `hf-posenc patch`."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import hf_posenc
from hf_posenc.cli import main
from hf_posenc.loading import load_model
from tests.checkpoint.checkpoint_cases import edit_json
from tests.integrations.subject import llama, tokenizer

from .conftest import save_tokenizer
from .running import logits, refused


class TestInspect:
    def test_prints_what_the_library_says(self, capsys, bert):
        assert main(["inspect", bert]) == 0
        assert capsys.readouterr().out.strip() == str(hf_posenc.inspect_model(load_model(bert))).strip()

    def test_a_config_is_enough(self, capsys, bert, tmp_path):
        (tmp_path / "config.json").write_text((Path(bert) / "config.json").read_text())
        assert main(["inspect", str(tmp_path), "--config-only"]) == 0
        assert "position_embeddings" in capsys.readouterr().out
        assert "cannot load" in refused(capsys, "inspect", str(tmp_path))
        edit_json(tmp_path / "config.json", hidden_size=None)
        assert "field 'hidden_size'" in refused(capsys, "inspect", str(tmp_path))

    @pytest.mark.parametrize(
        ("scheme", "tokens", "line"),
        [
            ("alibi", 64, "in force: alibi for 64 tokens; config, generation config and tokenizer agree; vLLM runs it "
             "with the plug-in; llama.cpp runs an export to gguf (the architecture 'refact'"),
            ({"scheme": "rope", "scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 64}}, 64,
             "in force: rope(yarn x4) for 256 tokens; the tokenizer cuts texts at 64 tokens"),
            ("kerple", 64, "vLLM does not run it (it adds a bias to the logits"),
        ],
        ids=["alibi", "yarn", "kerple"],
    )  # fmt: skip
    def test_one_line_says_what_is_in_force(self, capsys, tmp_path, scheme, tokens, line):
        llama(scheme).save_pretrained(tmp_path)
        words = tokenizer()
        words.model_max_length = tokens
        words.save_pretrained(tmp_path)
        assert main(["inspect", str(tmp_path)]) == 0
        assert line in capsys.readouterr().out.splitlines()[-1]

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("./outputs", "The folder ./outputs does not exist."),
            ("/outputs/yarn", "The folder /outputs/yarn does not exist."),
            ("a/b/c", "The folder a/b/c does not exist."),
            ("outputs/yarn", "There is no folder outputs/yarn, so it was looked up on the hub."),
        ],
    )
    @pytest.mark.parametrize(
        "verb", [["inspect"], ["eval", "dog"], ["export", "--output", "x"]], ids=["inspect", "eval", "export"]
    )
    def test_a_folder_that_does_not_exist(self, capsys, tmp_path, monkeypatch, verb, name, sentence):
        # Otherwise a hub that cannot be reached is asked again and again.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.chdir(tmp_path)
        assert sentence in refused(capsys, *verb, name)

    @pytest.mark.parametrize("verb", [["inspect"], ["eval", "dog"], ["export", "--output", "x"]], ids=" ".join)
    def test_a_folder_of_adapters_is_no_model(self, verb, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "adapters").mkdir()
        (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
        assert "contains PEFT adapters and no model. Merge them" in refused(capsys, *verb, "adapters")


class TestPatch:
    @pytest.fixture
    def once(self, capsys, llama, tmp_path):
        """A patched folder."""
        scaling = 'rope:scaling={"type": "yarn", "factor": 4.0, "original_max_positions": 32}'
        assert main(["patch", llama, scaling, "--output", str(tmp_path / "once")]) == 0
        capsys.readouterr()
        return str(tmp_path / "once")

    def test_the_tokenizer_gets_the_length_of_a_scaling(self, llama, tmp_path, capsys):
        """Serving engines and pipelines cut texts at the tokenizer's length."""
        stock, longer, exported = tmp_path / "stock", tmp_path / "longer", tmp_path / "exported"
        shutil.copytree(llama, stock)
        save_tokenizer(stock)
        AutoTokenizer.from_pretrained(stock, model_max_length=32).save_pretrained(stock)
        scaling = 'scaling={"type": "yarn", "factor": 4.0, "original_max_positions": 32}'
        assert main(["patch", str(stock), "native", "--option", scaling, "--output", str(longer)]) == 0
        assert main(["export", str(longer), "--output", str(exported)]) == 0
        short = tmp_path / "short"
        words = ["--option", "num_positions=32", "--replace", "--output", str(short)]
        assert main(["patch", str(longer), "learned", *words]) == 0
        folders = {longer: 128, exported: 128, short: 32}
        assert {folder: AutoTokenizer.from_pretrained(folder).model_max_length for folder in folders} == folders

    def test_a_longer_table_says_that_its_rows_are_random_or_is_made_from_the_old_rows(self, capsys, bert, tmp_path):
        words = ["patch", bert, "learned", "--option", "num_positions=80", "--output"]
        said = "48 of the 80 rows of the table of 'learned.*' are drawn at random.*--table-extension repeat"
        with pytest.warns(UserWarning, match=said):
            assert main([*words, str(tmp_path / "random")]) == 0
        with warnings.catch_warnings(action="error"):
            assert main([*words, str(tmp_path / "repeated"), "--table-extension", "repeat"]) == 0
        tables = [
            next(iter(load_model(str(tmp_path / name)).position_encoding.stacks.values())).additive.weight
            for name in ("random", "repeated")
        ]
        assert torch.equal(tables[0][:32], tables[1][:32])
        assert torch.equal(tables[1], tables[0][torch.arange(80) % 32])
        capsys.readouterr()
        refusals = {
            ("--option", "table_extension=repeat"): "--table-extension repeat for `hf-posenc patch`",
            ("--table-extension", "twice"): "expected one of 'linear', 'long_clip', 'spline', 'repeat', 'last'",
            ("--table-extension", "last", "--layers", "0"): "Omit --layers",
            ("--table-extension", "last", "--cross-attention", "alibi"): "has no cross-attention",
        }
        for more, message in refusals.items():
            command = ["patch", bert, "learned", "--output", str(tmp_path / "none"), *more]
            assert message in refused(capsys, *command)
        assert "fills the rows of a new learned table" in refused(
            capsys, "patch", bert, "alibi", "--output", str(tmp_path / "none"), "--table-extension", "last"
        )

    def test_what_a_message_says_to_type_can_be_typed(self, capsys, llama, tmp_path):
        said = refused(capsys, "patch", llama, "yarn", "--output", str(tmp_path / "none"))
        option = re.search(r"scaling=\{.*?\}", said)[0].replace("...", "4")
        assert main(["patch", llama, "rope", "--output", str(tmp_path / "yarn"), "--option", option]) == 0

    @pytest.mark.parametrize(
        ("words", "scheme", "options"),
        [
            (["p_rope", "--option", "theta=77", "fraction=0.5"], "p_rope", {"theta": 77, "fraction": 0.5}),
            (["rope:theta=300", "--layers", "0,1", "--elsewhere", "none"], "rope",
             {"theta": 300, "layers": [0, 1], "elsewhere": "none"}),
        ],
    )  # fmt: skip
    def test_options_are_those_of_patch_model(self, llama, tmp_path, capsys, words, scheme, options):
        assert main(["patch", llama, *words, "--output", str(tmp_path)]) == 0
        assert "without a tokenizer" in capsys.readouterr().err
        expected = hf_posenc.patch_model(load_model(llama), scheme, **options)
        found = load_model(str(tmp_path))
        assert found.position_encoding.config == expected.position_encoding.config
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
        lines = capsys.readouterr().err.splitlines()
        assert "hf-posenc: error: Plain transformers cannot run the scheme alibi of this LlamaForCausalLM." in lines
        assert lines[-1].startswith("- run the checkpoint where hf_posenc is installed")
        assert not output.exists()

    def test_a_patched_checkpoint_is_not_patched_again_by_accident(self, capsys, once, tmp_path):
        twice = tmp_path / "twice"
        for words in (["native", "--stock"], ["native"], ["alibi"]):
            message = refused(capsys, "patch", once, *words, "--output", str(twice))
            assert "already has the position encoding rope(yarn x4)" in message
            assert f"hf-posenc export {once}" in message
            assert not twice.exists()
        assert main(["patch", once, "alibi", "--replace", "--output", str(twice)]) == 0
        assert json.loads((twice / "config.json").read_text())["position_encoding"]["scheme"]["scheme"] == "alibi"

    def test_export_keeps_the_scheme_without_the_plugin(self, capsys, llama, once, tmp_path):
        plain = tmp_path / "plain"
        assert main(["export", once, "--output", str(plain)]) == 0
        assert "is saved without a tokenizer" in capsys.readouterr().err
        config = json.loads((plain / "config.json").read_text())
        assert (config["model_type"], config["rope_parameters"]["rope_type"]) == ("llama", "yarn")
        assert torch.equal(logits(plain), logits(once))
        capsys.readouterr()
        assert "not patched" in refused(capsys, "export", llama, "--output", str(tmp_path / "x"))
        assert "not empty" in refused(capsys, "export", once, "--output", str(plain))
        assert main(["patch", llama, "alibi", "--output", str(tmp_path / "alibi")]) == 0
        capsys.readouterr()
        assert main(["export", str(tmp_path / "alibi"), "--output", str(tmp_path / "y")]) == 2
        assert "is saved without" not in capsys.readouterr().err
        assert not (tmp_path / "y").exists()

    @pytest.mark.parametrize("patched_before", [True, False], ids=["saved-patch", "patch-in-memory"])
    def test_export_merges_adapters_when_asked(self, capsys, llama, tmp_path, patched_before):
        peft = pytest.importorskip("peft")
        base, adapter, plain = llama, str(tmp_path / "adapter"), tmp_path / "plain"
        if patched_before:
            base = str(tmp_path / "base")
            assert main(["patch", llama, "p_rope", "--output", base]) == 0
        model = load_model(base)
        if not patched_before:
            hf_posenc.patch_model(model, "p_rope")
        options = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        with_adapter = peft.get_peft_model(model, options).eval()
        with_adapter.save_pretrained(adapter)
        words = ("export", adapter, "--output", str(plain))
        capsys.readouterr()
        assert "--merge-adapters" in refused(capsys, *words)
        assert not plain.exists()
        assert main([*words, "--merge-adapters"]) == 0
        with torch.no_grad():
            expected = with_adapter(torch.tensor([[4, 5, 6, 7, 5]])).logits
        torch.testing.assert_close(logits(plain), expected, atol=1e-5, rtol=0)
        capsys.readouterr()
        message = refused(capsys, "export", base, "--output", str(tmp_path / "x"), "--merge-adapters")
        assert "no adapter_config.json" in message
        edit_json(Path(adapter) / "adapter_config.json", base_model_name_or_path=None)
        assert "has base_model_name_or_path None" in refused(capsys, *words, "--merge-adapters", "--overwrite")

    @pytest.mark.parametrize("verb", ["patch", "export"])
    def test_a_folder_inside_a_file_is_refused_before_the_model_is_loaded(self, capsys, tmp_path, verb):
        (tmp_path / "file").write_text("mine")
        words = [verb, "no/such/model", *(["alibi"] if verb == "patch" else []), "--output"]
        message = refused(capsys, *words, str(tmp_path / "file" / "new"))
        assert "is a file" in message
        assert "no/such/model" not in message

    def test_an_error_of_the_file_system_is_one_line(self, capsys, llama, tmp_path, monkeypatch):
        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", full)
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
        assert main(["patch", llama, "alibi", "--output", str(tmp_path / "new")]) == 2
        assert "new cannot be written: [Errno 28] No space left on device" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_an_error_of_the_hub_stays_its_own(self, llama, tmp_path, monkeypatch):
        def refuses(*_, **__):
            raise OSError("401 Client Error")

        monkeypatch.setattr("hf_posenc.export_model", refuses)
        with pytest.raises(OSError, match="401 Client Error"):
            main(["patch", llama, "p_rope", "--stock", "--output", str(tmp_path / "new")])

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
            (["rope", "--option", "theta=-5"], "theta"),
            (["composed"], "parts"),
            (['composed:parts=["rope","p_rope"]'], "map queries and keys"),
            (["rope", "--elsewhere", "none"], "Pass `layers` as well"),
            (["rope", "--layers", "0,99", "--elsewhere", "none"], "99"),
        ],
    )
    def test_bad_requests_write_nothing(self, capsys, llama, tmp_path, words, message):
        output = tmp_path / "new"
        assert message in refused(capsys, "patch", llama, *words, "--output", str(output))
        assert not output.exists()
