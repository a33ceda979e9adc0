import json

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
)

from hf_posenc.cli import main
from hf_posenc.report import Result
from tests.models import tiny

TEXT = (
    "the dog another a chases pig cat horse boy girl man woman and then with old small red house garden near over "
    "teacher student doctor lawyer king queen sees follows helps calls likes hears knows walked field water road "
    "today finds"
)
WORDS = TEXT.split()


def _save_tokenizer(folder, *, mask):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: index for index, token in enumerate([*special, *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    if mask:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    sizes = {"vocab_size": 64, "initializer_range": 0.2}
    built = {}
    for name, model_class in (("bert", "BertForMaskedLM"), ("headless", "BertModel"), ("llama", "LlamaForCausalLM")):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(name)
        tiny(model_class, **sizes).save_pretrained(folder)
        _save_tokenizer(folder, mask=name != "llama")
        built[name] = str(folder)
    return built


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    words = [WORDS[index] for index in torch.randint(len(WORDS), (600,), generator=generator)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words))
    return str(path)


def _result(capsys, arguments):
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    return Result.from_dict(json.loads(capsys.readouterr().out))


def test_loss_by_length_of_a_causal_model(folders, text, capsys, tmp_path):
    words = ["eval", "loss", folders["llama"], "--text", text, "--lengths", "16", "32", "--max-windows", "4"]
    words += ["--sliding-window", "16", "--schemes", "native,none", "alibi"]
    result = _result(capsys, [*words, "--plot", str(tmp_path / "loss.png")])
    assert (tmp_path / "loss.png").stat().st_size > 0
    assert [subject.scheme for subject in result.subjects] == ["native", "none", "alibi"]
    assert result.settings["causal"]
    assert result.settings["special_tokens"] == 0
    for label in result.labels:
        # 4 windows of 32 tokens: the first of each piece has no context.
        counts = {record.at["length"]: record.count for record in result.of(label, "loss")}
        assert counts == {16: 4 * 2 * 15, 32: 4 * 31}
        assert result.value(label, "sliding_loss", window=16) is not None
    assert result.value("native", "loss", length=32) != result.value("none", "loss", length=32)
    assert main([*words, "--markdown"]) == 0
    page = capsys.readouterr().out
    assert "| alibi" in page
    assert "Perplexity" in page


def test_a_result_is_shown_again_from_its_file(folders, text, capsys, tmp_path):
    words = ["eval", "loss", folders["llama"], "--text", text, "--lengths", "16", "32", "--max-windows", "2"]
    result, file = _result(capsys, words), tmp_path / "loss.json"
    result.save(file)
    for form in ([], ["--markdown"]):
        assert main([*words, *form]) == main(["report", str(file), *form]) == 0
        first, _, second = capsys.readouterr().out.partition(result.title)[2].partition(result.title)
        assert first == second
    assert main(["report", str(file), "--html", "--plot", str(tmp_path / "loss.svg")]) == 0
    assert f"<h1>{result.title}</h1>" in (page := capsys.readouterr().out)
    assert f"<td>{result.value('native', 'loss', length=32):.4g}</td>" in page
    assert (tmp_path / "loss.svg").stat().st_size > 0


def test_what_is_no_result_is_said(capsys, tmp_path):
    file = tmp_path / "result.json"
    for content in ("{", "{}", "[]"):
        file.write_text(content)
        assert main(["report", str(file)]) == 2
        assert "holds no result" in capsys.readouterr().err
    Result("properties", "x", (), (), (), ()).save(file)
    assert main(["report", str(file), "--plot", str(tmp_path / "x.png")]) == 2
    assert "there is one of dog, loss" in capsys.readouterr().err


def test_an_option_may_be_none(folders, text, capsys):
    words = ["eval", "loss", folders["llama"], "--text", text, "--lengths", "32", "--max-windows"]
    some, whole = (_result(capsys, [*words, count]).settings["windows"] for count in ("4", "none"))
    assert some == 4 < whole


def test_loss_by_length_of_a_masked_model_says_which_length_it_has_no_positions_for(folders, text, capsys):
    words = ["eval", "loss", folders["bert"], "--text", text, "--lengths", "32", "128", "--max-windows", "4"]
    result = _result(capsys, [*words, "--schemes", "native", "none", "forget_gate"])
    assert not result.settings["causal"]
    assert result.settings["special_tokens"] == 2
    too_long = result.record("native", "loss", length=128)
    assert too_long.value is None
    assert "64 positions" in too_long.note
    assert all(record.value is not None for record in result.of("none", "loss"))
    assert list(result.of("forget_gate")) == []
    assert "bidirectional" in result.subject("forget_gate").error
    assert main([*words, "--schemes", "native", "forget_gate"]) == 0
    table = capsys.readouterr().out
    assert "length 128: Position 127 lies past the 64 positions" in table
    assert "[2] cannot be measured" in table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "{text}", "--lengths", "5000"], "Give more text"),
        (["--text", "{text}", "--lengths", "16", "--stride", "4"], "sliding_window too"),
        (["--text", "{text}", "--lengths", "16", "--sliding-window", "8", "--stride", "9"], "leaves tokens out"),
        (["--text", "{text}", "--lengths", "16", "--plot", "nowhere/x.png"], "does not exist"),
        (["--text", "{text}", "--lengths", "16", "--plot", "x.xyz"], "figures end in"),
        (["--text", "{text}", "--lengths", "16", "--dark"], "name its file with --plot"),
        (["--text", "{text}", "--lengths", "16", "--mask-probability", "0.5"], "for masked models"),
        (["--text", "{empty}", "--lengths", "16"], "nothing to predict"),
        (["--text", "{text}", "--lengths", "16", "--tokenizer", "{bytes}"], "it is that of another model"),
        (["--text", "{text}", "--lengths", "16", "--schemes", "ropee"], "Did you mean 'rope'"),
        (["--text", "{text}", "--lengths", "16", "--device", "nodevice"], "--device nodevice"),
    ],
)
def test_loss_with_impossible_options_says_why(folders, text, tmp_path, capsys, words, message):
    ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    files = {"text": text, "empty": tmp_path / "empty.txt", "bytes": tmp_path}
    assert main(["eval", "loss", folders["llama"], *(word.format(**files) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_loss_needs_a_language_model_and_a_mask_token(folders, text, capsys):
    words = ["--text", text, "--lengths", "16"]
    assert main(["eval", "loss", folders["headless"], *words]) == 2
    assert "AutoModelForMaskedLM" in capsys.readouterr().err
    assert main(["eval", "loss", folders["bert"], "--tokenizer", folders["llama"], *words]) == 2
    assert "has no mask token" in capsys.readouterr().err


def test_sensitivity_under_several_schemes(folders, text, capsys):
    words = ["eval", "sensitivity", folders["bert"], "--schemes", "native,none", "--gaps", "2", "8", "--offsets", "1"]
    words += ["--context", "16", "--text", text]
    result = _result(capsys, words)
    last = {scheme: [*result.of(scheme, "repeated", gap=2)][-1].value for scheme in ("native", "none")}
    assert last["native"] > 1e-3
    assert last["none"] <= 1e-5
    assert {record.at["gap"] for record in result.of("none", "repeated")} == {2, 8}
    assert [record.at["offset"] for record in result.of("none", "shift")] == [1]
    assert result.settings["context"] == 16
    assert main([*words, "--markdown"]) == 0
    assert "| gap 2 |" in capsys.readouterr().out


def test_sensitivity_with_a_text_that_is_too_short_says_so(folders, capsys, tmp_path):
    (tmp_path / "short.txt").write_text("the dog")
    words = ["--text", str(tmp_path / "short.txt"), "--gaps", "2", "--schemes", "none"]
    assert main(["eval", "sensitivity", folders["bert"], *words]) == 2
    assert "3 tokens, and one window alone needs 50" in capsys.readouterr().err


def test_quantised_positions_of_a_causal_and_of_a_masked_model(folders, text, capsys):
    words = ["--text", text, "--length", "16", "--max-windows", "2", "--variants", "ids bfloat16", "encodings int8"]
    words += ["--positions", "0", "4000"]
    result = _result(capsys, ["eval", "quantized", folders["llama"], *words])
    assert {record.at["held in"] for record in result.of("native", "loss")} == {
        "float32", "ids bfloat16", "encodings int8",
    }  # fmt: skip
    changes = [record for record in result.of("native", "change") if record.at["held in"] == "ids bfloat16"]
    assert [record.at["position"] for record in changes] == [0, 4000]
    assert changes[0].value == 0
    assert changes[1].value != 0
    assert main(["eval", "quantized", folders["bert"], *words, "--schemes", "native,none", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert "| encodings int8" in page
    assert "64 positions" in page
    assert "cannot be measured" in page


def test_an_unknown_variant_is_refused(folders, text, capsys):
    words = ["--text", text, "--length", "16", "--variants", "ids int3"]
    assert main(["eval", "quantized", folders["llama"], *words]) == 2
    assert "ids bfloat16" in capsys.readouterr().err
