"""`hf-posenc eval` and `hf-posenc report`: the output, the figures, and the refusals."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

import hf_posenc
from hf_posenc import patch_model
from hf_posenc.cli import main
from hf_posenc.cli.catalogue import meanings_of
from hf_posenc.evaluations import EVALUATIONS
from hf_posenc.loading import load_model
from hf_posenc.metrics import picture_dog_test
from hf_posenc.report import Result
from tests.models import tiny

from .conftest import EVALUATED_WORDS as WORDS, save_evaluated_models, save_tokenizer
from .running import refused


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_evaluated_models(tmp_path_factory)


@pytest.fixture(scope="module")
def files(folders, tmp_path_factory):
    """What `{name}` stands for in the words of a command."""
    folder = tmp_path_factory.mktemp("files")
    generator = torch.Generator().manual_seed(0)
    words = [WORDS[index] for index in torch.randint(len(WORDS), (600,), generator=generator)]
    contents = {"text": " ".join(words), "empty": ""}
    for name, content in contents.items():
        (folder / name).write_text(content)
    return folders | {name: str(folder / name) for name in contents} | {"folder": str(folder)}


@pytest.fixture
def printed(files, capsys):
    """Runs an evaluation and returns what it prints."""

    def run(words: str, *more: str) -> str:
        capsys.readouterr()
        assert main(["eval", *words.format(**files).split(), *more]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def result(printed):
    return lambda words, *more: Result.from_dict(json.loads(printed(words, *more, "--json")))


@pytest.mark.parametrize("name", EVALUATIONS)
def test_every_parameter_is_an_option_with_its_meaning(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["eval", name, "--help"])
    assert caught.value.code == 0
    page = capsys.readouterr().out
    assert len(page.splitlines()) <= 60
    page = " ".join(page.split())
    evaluation = EVALUATIONS[name]
    function = evaluation.measure()
    meanings = meanings_of(inspect.getdoc(function))
    parameters = set(inspect.signature(function).parameters)
    assert "schemes" in parameters
    for option in parameters - {"model", "tokenizer", "schemes", "material", "normalization"}:
        assert ("--text" if option in ("text", "texts") else "--" + option.replace("_", "-")) in page
        assert meanings[option].replace("`", "") in page
    assert ("--plot" in page) == (evaluation.plot is not None)
    if evaluation.plot is not None:
        assert list(inspect.signature(evaluation.draw()).parameters) == ["result", "path", "dark"]
    assert (Path(__file__).resolve().parents[2] / "eval" / f"{name.replace('-', '_')}.py").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generalization model --task copy --samples many", "invalid int value: 'many'"),
        ("generalization model --task copy --method guess", "invalid choice: 'guess'"),
        ("generalization model", "--task"),
    ],
)
def test_types_of_values_are_those_of_the_function(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["eval", *words.split()])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("generalization {bytes} --task copy --lengths 2 30 --schemes native learned:num_positions=20 --markdown",
         ["| native (rope", "learned(num_positions=20)", "length 30: "]),
        ("quantized {bert} --text {text} --length 16 --max-windows 2 --positions 0 4000 --variants encodings~int8 "
         "--schemes native,none --markdown", ["| encodings int8", "64 positions", "cannot be measured"]),
        ("properties --schemes none, rope:theta=500000 --markdown", ["| none ", "rope(theta=500000)"]),
        ("loss {llama} --text {text} --lengths 16 --schemes alibi --markdown", ["| alibi", "Perplexity"]),
        ("loss {bert} --text {text} --lengths 32 128 --max-windows 4 --schemes native forget_gate",
         ["length 128: Position 127 lies past the 64 positions", "[2] cannot be measured"]),
        ("dog {llama} --tokenizer {words}", ["the mask alone"]),
    ],
)  # fmt: skip
def test_what_is_printed(files, capsys, words, shown):
    assert main(["eval", *(word.format(**files).replace("~", " ") for word in words.split())]) == 0
    out = capsys.readouterr().out
    assert [text for text in shown if text not in out] == []


def test_all_schemes(result, third_party):
    names = [subject.scheme for subject in result("dog {bert} --schemes all").subjects]
    assert names[0] == "native"
    assert set(hf_posenc.list_schemes()) - set(names) == {"third_party"}


def test_an_option_may_be_none(result):
    words = "loss {llama} --text {text} --lengths 32 --max-windows "
    some, whole = (result(words + count).settings["windows"] for count in ("4", "none"))
    assert some == 4 < whole


@pytest.mark.parametrize(
    "words",
    [
        "dog {bert}",
        "loss {llama} --text {text} --lengths 16 32 --max-windows 2",
        "picture-dog {vit} --schemes native none alibi:axes=2 rope_nd",
    ],
)
def test_a_result_is_drawn_and_is_shown_again_from_its_file(printed, result, capsys, tmp_path, words):
    pytest.importorskip("matplotlib")
    measured, file, figure = (
        result(words, "--plot", str(tmp_path / "x.png")),
        tmp_path / "x.json",
        tmp_path / "again.svg",
    )
    assert (tmp_path / "x.png").stat().st_size > 0
    measured.save(file)
    for form in ([], ["--markdown"]):
        expected = printed(words, *form)
        assert main(["report", str(file), *form]) == 0
        assert capsys.readouterr().out == expected
    assert main(["report", str(file), "--html", "--plot", str(figure), "--dark"]) == 0
    page = capsys.readouterr().out
    assert f"<title>{measured.title.split(':')[0]}" in page
    if measured.task == "loss":
        assert f"<h1>{measured.title}</h1>" in page
        assert all(f"<td>{record.value:.4g}</td>" in page for record in measured.of(quantity="loss"))
    assert figure.read_text().lstrip().startswith("<?xml")


@pytest.fixture(scope="module")
def final(folders, tmp_path_factory):
    """Folders of equal names: a stock Llama, one patched with ALiBi, and a deeper one."""
    runs = tmp_path_factory.mktemp("runs")
    for name, scheme, layers in (("base", "native", 2), ("mine", "alibi", 2), ("deep", "native", 3)):
        torch.manual_seed(0)
        model = tiny("LlamaForCausalLM", vocab_size=64, initializer_range=0.2, num_hidden_layers=layers)
        (model if scheme == "native" else patch_model(model, scheme)).save_pretrained(runs / name / "final")
        save_tokenizer(runs / name / "final", WORDS)
    return {name: str(runs / name / "final") for name in ("base", "mine", "deep")}


def test_several_models_share_a_table_and_a_figure_with_the_names_of_their_folders(
    result, final, files, capsys, tmp_path
):
    pytest.importorskip("matplotlib")
    options = f"--text {files['text']} --lengths 16 32 --max-windows 2"
    figure = tmp_path / "loss.svg"
    together = result(f"loss {final['base']} {final['mine']} {options}", "--plot", str(figure))
    assert together.labels == ["base/final", "mine/final"]
    assert [subject.scheme for subject in together.subjects] == ["native", "alibi"]
    assert together.title.startswith("2 models: loss of the next token")
    assert together.table().split("\n")[4].split()[:2] == ["model", "16"]
    drawn = figure.read_text()
    assert all(name in drawn for name in ("2 models", "base/final", "mine/final"))
    assert "LlamaForCausalLM" not in drawn + together.table()

    for name in ("base", "mine"):
        alone = result(f"loss {final[name]} {options}")
        assert alone.title.startswith("final: loss")
        assert [r.value for r in alone.of(quantity="loss")] == [r.value for r in together.of(f"{name}/final", "loss")]
        alone.save(tmp_path / f"{name}.json")
    words = [str(tmp_path / "base.json"), str(tmp_path / "mine.json"), "--json", "--plot", str(figure)]
    assert main(["report", *words]) == 0
    assert Result.from_dict(json.loads(capsys.readouterr().out)) == together
    # A further model joins; of the same model, the names of the files tell the results apart.
    together.save(tmp_path / "both.json")
    result(f"loss {final['mine']} {options} --schemes none rope").save(tmp_path / "other.json")
    assert main(["report", str(tmp_path / "both.json"), str(tmp_path / "other.json")]) == 0
    assert "final: rope" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "mine.json"), str(tmp_path / "other.json")]) == 0
    assert {"mine", "other: rope"} <= {line.split("  ")[0] for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize(
    "words",
    ["dog", "attention --text {text} --length 16", "sensitivity --gaps 2 --offsets 1 --context 8 --text {text}"],
)
def test_layers_of_models_of_other_depths_stand_in_order(printed, result, final, words):
    name, *options = words.split()
    command = " ".join([name, final["base"], final["deep"], *options])
    together = result(command)
    assert together.labels == ["base/final", "deep/final"]
    for label, folder in zip(together.labels, ("base", "deep"), strict=True):
        alone = result(" ".join([name, final[folder], *options]))
        assert [(r.quantity, r.at, r.value) for r in together.of(label)] == sorted(
            ((r.quantity, r.at, r.value) for r in alone.of()), key=lambda one: one[1].get("layer", 0)
        )
    if name == "dog":
        headings = printed(command).split("\n")[2]
        assert headings.index("layer 1") < headings.index("layer 2") < headings.index("layer 3")


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("loss {text} 16", "loss {text} 16 32", "lengths is [16] for one and [16, 32] for the other"),
        ("loss {text} 16", "loss {other} 16", "they read different data: a different text"),
        ("loss {text} 16", "dog", "they come from different evaluations, 'loss' and 'dog'"),
        ("loss {text} 16", "loss {text} 16 --dtype bfloat16", "dtype is 'float32' for one and 'bfloat16' for the"),
    ],
)
def test_what_cannot_share_a_figure_is_refused(result, final, files, capsys, tmp_path, first, second, reason):
    other = tmp_path / "other.txt"
    other.write_text(" ".join(reversed(Path(files["text"]).read_text().split())))
    for name, words in (("base", first), ("mine", second)):
        evaluation, *rest = words.format(text=files["text"], other=other).split()
        options = f"--text {rest[0]} --max-windows 2 --lengths {' '.join(rest[1:])}" if rest else ""
        result(f"{evaluation} {final[name]} {options}").save(tmp_path / f"{name}.json")
    said = refused(capsys, "report", str(tmp_path / "base.json"), str(tmp_path / "mine.json"))
    assert f"base/final and mine/final cannot share a table or figure: {reason}" in said


def test_models_that_cannot_be_compared_are_refused(final, files, capsys):
    said = refused(capsys, "eval", "loss", final["base"], files["bert"], "--text", files["text"], "--lengths", "16")
    assert (
        f"final and {Path(files['bert']).name} cannot share a table or figure: one model predicts the next token"
        in said
    )
    said = refused(capsys, "eval", "dog", final["base"], final["base"])
    assert "is given twice" in said
    said = refused(capsys, "eval", "dog", final["base"], files["vit"])
    assert said.startswith(f"hf-posenc: error: {files['vit']}: ")


def test_the_figure_of_a_picture_has_the_dogs_and_a_line_for_each_scheme(folders):
    pytest.importorskip("matplotlib")
    from hf_posenc.plots.dog import plot_picture_dog

    measured = picture_dog_test(load_model(folders["vit"]), ["none", "rope_nd"], first=(0, 0), second=(6, 2))
    picture, lines = plot_picture_dog(measured).axes
    assert [patch.get_xy() for patch in picture.patches] == [(0, 0), (2, 6)]
    drawn = {line.get_label(): list(line.get_ydata()) for line in lines.get_lines()}
    assert drawn["rope_nd"][1:] == [record.value for record in measured.of("rope_nd", "relative_l2")][1:]
    assert max(drawn["none"]) < measured.settings["tolerance"]
    nothing = Result.from_dict(measured.to_dict() | {"records": []})
    with pytest.raises(ValueError, match="Nothing to plot"):
        plot_picture_dog(nothing)


def test_what_is_no_result_is_said(capsys, tmp_path):
    file = tmp_path / "result.json"
    for content in ("{", "{}", "[]"):
        file.write_text(content)
        assert "does not contain a result" in refused(capsys, "report", str(file))
    Result("properties", "x", (), (), (), ()).save(file)
    assert "these have one: dog, loss" in refused(capsys, "report", str(file), "--plot", str(tmp_path / "x.png"))


LOSS = "loss {llama} --text {text} --lengths 16 "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dog {bert} --schemes alibbi", "Did you mean 'alibi'"),
        ("dgo {bert}", "Unknown evaluation 'dgo'. Did you mean 'dog'? Known: attention, dog,"),
        ("dog {words}", "cannot load"),
        ("loss {llama} --text nowhere.txt", "nowhere.txt"),
        ("loss {llama} --text {text} --lengths 5000", "Use more text"),
        ("loss {llama} --text {empty} --lengths 16", "nothing to predict"),
        (LOSS + "--stride 4", "sliding_window too"),
        (LOSS + "--plot nowhere/x.png", "does not exist"),
        (LOSS + "--plot x.xyz", "the extension must be one of"),
        (LOSS + "--dark", "Give its file with --plot"),
        (LOSS + "--mask-probability 0.5", "for masked models"),
        (LOSS + "--tokenizer {bytes}", "It is the tokenizer of another model"),
        (LOSS + "--device nodevice", "--device nodevice"),
        ("loss {headless} --text {text} --lengths 16", "AutoModelForMaskedLM"),
        ("loss {bert} --text {text} --lengths 16 --tokenizer {words}", "has no mask token"),
        ("quantized {llama} --text {text} --length 16 --variants ids~int3", "ids bfloat16"),
        ("generalization {bert} --tokenizer {bytes} --task copy", "only knows 64. It is the tokenizer"),
        ("resolution {vit} --resolutions 32 --dataset {folder}/none", "Cannot load the pictures"),
        *((words, f"reads 'pixel_values'.*{instead}")
          for words in ("dog {vit}", "loss {vit} --text {text}")
          for instead in ("picture-dog", "image-sensitivity", "resolution")),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(files, capsys, words, message):
    said = refused(capsys, "eval", *(word.format(**files).replace("~", " ") for word in words.split()))
    *parts, last = message.split(".*")
    assert all(part in said for part in (*parts, last))


def test_a_model_without_a_tokenizer(capsys, llama):
    message = refused(capsys, "eval", "dog", llama)
    assert "Give one with --tokenizer" in message
    assert "AutoTokenizer cannot load" in message
