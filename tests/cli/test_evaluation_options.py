"""Every evaluation has a verb, a script and a documented option for each parameter that can be typed."""

import inspect
from pathlib import Path

import pytest

from hf_posenc.cli import main
from hf_posenc.cli.catalogue import meanings_of
from hf_posenc.evaluations import EVALUATIONS

EVAL = Path(__file__).resolve().parents[2] / "eval"


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_verb_has_every_parameter_with_its_meaning(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["eval", name, "--help"])
    assert caught.value.code == 0
    page = " ".join(capsys.readouterr().out.split())
    evaluation = EVALUATIONS[name]
    function = evaluation.measure()
    meanings = meanings_of(inspect.getdoc(function))
    for option in set(inspect.signature(function).parameters) - {"model", "tokenizer", "schemes", "material"}:
        flag = "--text" if option == evaluation.files else "--" + option.replace("_", "-")
        assert flag in page
        assert meanings[option].replace("`", "") in page
    assert ("--plot" in page) == (evaluation.plot is not None)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_has_a_script(name):
    assert (EVAL / f"{name.replace('-', '_')}.py").is_file()


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_row_names_parameters_of_its_function(name):
    evaluation = EVALUATIONS[name]
    parameters = inspect.signature(evaluation.measure()).parameters
    assert "schemes" in parameters
    assert {evaluation.data, evaluation.files} - {None} <= set(parameters)
    if evaluation.plot is not None:
        assert list(inspect.signature(evaluation.draw()).parameters) == ["result", "path", "dark"]


def test_types_of_values_are_those_of_the_function(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "generalization", "model", "--task", "copy", "--samples", "many"])
    assert "invalid int value: 'many'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", "generalization", "model", "--task", "copy", "--method", "guess"])
    assert "invalid choice: 'guess'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", "generalization", "model"])
    assert "--task" in capsys.readouterr().err
