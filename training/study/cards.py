"""A model card for every saved model of a study, from its results."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from hf_posenc.checkpoint.cards import card_data, loading_section, pipeline_tag, scheme_section
from hf_posenc.report.tables import format_table
from training.data.loading import DEFAULT_PACKAGE
from training.files import write_text
from training.study.aggregation import ROUNDING, Aggregate, aggregate
from training.study.schema import FINISHED, GENERALIZATION, ResultsError
from training.study.tables import MISSING, budget_lines, number, ranges

TEMPLATE = Path(__file__).resolve().parents[2] / "model_cards" / "template.md"
#: Of the weights: that of this repository.
_LICENSE = "apache-2.0"
#: A loss above this one is written without its perplexity, which would be a number of dozens of digits.
_LARGEST_LOSS = 50.0

_DEFAULT_SOURCE = f"Python package {DEFAULT_PACKAGE}"
_DEFAULT_NAME = "State of the Union speeches"
_DEFAULT_LICENCE = (
    "The speeches are works of the United States government and in the public domain; the package that carries them is "
    "under the MIT licence."
)
_UNKNOWN_LICENCE = "The study does not know the licence of that text: look it up at its source before passing this on."


def write_model_cards(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the card of each saved model as `README.md` into its folder.

    A model that is not there gets no card: results may be read where the weights are not.

    Args:
        results: of a study.
        folder: of the study; the models' paths are relative to it.
    """
    paths = []
    for run, card in study_cards(results):
        model_folder = folder / run["model"]
        if model_folder.is_dir():
            paths.append(_write(card, model_folder / "README.md"))
    return paths


def write_cards(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the cards of all saved models side by side, as `STUDY-MODEL.md`, and an index of every card there.

    Args:
        results: of a study.
        folder: such as `model_cards/`. Cards of other studies in it stay.
    """
    paths = [_write(card, folder / f"{card_name(results, run)}.md") for run, card in study_cards(results)]
    index = folder / "README.md"
    write_text(index, format_index(folder))
    return [*paths, index]


def study_cards(results: dict[str, Any]) -> list[tuple[dict[str, Any], ModelCard]]:
    """Each run that saved a model, with its card.

    Raises:
        ResultsError: for results that `check_results` refuses.
    """
    aggregates = {(item.task, item.scheme): item for item in aggregate(results)}
    saved = [run for run in results["runs"] if run["status"] == FINISHED and run["model"] is not None]
    return [(run, _card(results, run, aggregates)) for run in saved]


def card_name(results: dict[str, Any], run: dict[str, Any]) -> str:
    """Such as `length-causal-rope-seed0`."""
    study = re.sub(r"[^\w.-]+", "-", results["name"])
    return f"{study}-{Path(run['model']).name}"


def format_index(folder: Path) -> str:
    """The index of all cards in a folder, read from their metadata."""
    rows = []
    for path in sorted(folder.glob("*.md")):
        if path.name in ("README.md", TEMPLATE.name):
            continue
        data = ModelCard.load(path).data
        scores = data.eval_results or []
        shown = [f"{score.metric_name}: {score.metric_value:g}" for score in (scores[:1] + scores[-1:])]
        tags = ", ".join(tag for tag in data.tags if tag not in ("hf_posenc", "position-encoding"))
        rows.append(
            (f"[{path.stem}]({path.name})", data.pipeline_tag or MISSING, tags, "; ".join(dict.fromkeys(shown)))
        )
    table = format_table(("model", "task", "tags", "first and last result"), rows, markdown=True)
    return (
        "# Model cards\n\nOne card per model that a study trained and saved, written by `training/study/cards.py` from "
        f"[{TEMPLATE.name}]({TEMPLATE.name}) and the results of the run. The weights are not in this repository: each "
        f"card has the command that makes them.\n\n{table}\n"
    )


def _write(card: ModelCard, path: Path) -> Path:
    write_text(path, card.content if card.content.endswith("\n") else f"{card.content}\n")
    return path


def _card(results: dict[str, Any], run: dict[str, Any], aggregates: dict[tuple[str, str], Aggregate]) -> ModelCard:
    task = results["tasks"][run["task"]]
    item = aggregates[run["task"], run["scheme"]]
    name = card_name(results, run)
    patched = run["config"] is not None
    scheme = run["config"]["scheme"] if patched else "unpatched"
    generated = task["kind"] == GENERALIZATION
    default_text = not generated and _corpus(results, run)["source"] == _DEFAULT_SOURCE
    data = card_data(
        name,
        task["model"],
        scheme,
        tags=[run["task"].replace("_", "-")],
        eval_results=_eval_results(results, run, task),
        license=_LICENSE,
        language="en" if default_text else None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        description=_description(run, task),
        position_encoding=_position_encoding(run, task),
        notes=[*run["notes"], *budget_lines(task, item)],
        training_data=_generated_data(run, task) if generated else _text_data(_corpus(results, run)),
        training=_training(run, task),
        command=results["command"],
        results_text=_results_text(results, run, task),
        results_table=_results_table(run, task, item, aggregates),
        results_notes=_results_notes(run, task, item),
        limits=_limits(results, run, task, item, default_text),
        loading=loading_section(run["model"], task["model"], patched=patched, tokenizer=True),
        versions=results["versions"],
        machine=_machine(results, run),
    )


def _machine(results: dict[str, Any], run: dict[str, Any]) -> str:
    machine = results["machine"]
    threads = f"{run.get('threads', machine['threads_per_run'])} thread(s)"
    processes = run.get("processes", 1)
    each = threads if processes == 1 else f"{processes} processes of {threads}"
    return f"{machine.get('gpu', machine['cpu'])}, {each}"


def _trainings(results: dict[str, Any], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that a model went through, first to last; one that only read a model is none."""
    start = run.get("from")
    before = [
        trained
        for found in results["runs"]
        if start and (found["task"], found["scheme"], found["seed"]) == (run["task"], start, run["seed"])
        for trained in _trainings(results, found)
    ]
    return [*before, run] if run.get("curve", {"step": [0]})["step"][-1] else before


def _trained_lengths(trainings: list[dict[str, Any]], task: dict[str, Any]) -> list[int]:
    return [run.get("training", {}).get("train_length", task["train_length"]) for run in trainings]


def _corpus(results: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    corpus: dict[str, Any] | None = results["corpus"]
    if corpus is None:
        raise ResultsError(f"The task {run['task']!r} was trained on text, but the results have no corpus.")
    return corpus


def _description(run: dict[str, Any], task: dict[str, Any]) -> str:
    aim = {
        "causal": "predict the next token",
        "masked": "fill in masked tokens",
    }.get(task.get("objective", ""), f"solve the synthetic task '{run['task']}'")
    begin = "Trained from scratch"
    if run.get("from"):
        further = "Trained further" if run["curve"]["step"][-1] else "The weights, without further training,"
        begin = f"{further} from the model `{run['from']}` of the same study, which was trained"
    which = "the unpatched control" if run["config"] is None else f"position encoding `{run['scheme']}`"
    return (
        f"A small `{task['model']}` ({run['parameters']:,} parameters): {which}. {begin} to {aim}; seed {run['seed']}."
    )


def _position_encoding(run: dict[str, Any], task: dict[str, Any]) -> str:
    if run["config"] is None:
        return f"The stock one of `{task['model']}`: this is the control that the patched models are compared with."
    return scheme_section(run["config"], task["model"])


def _text_data(corpus: dict[str, Any]) -> str:
    known = corpus["source"] == _DEFAULT_SOURCE
    source = f"{_DEFAULT_NAME} ({_DEFAULT_SOURCE})" if known else corpus["source"]
    return (
        f"Data: {source}, {corpus['train_documents']:,} documents with {corpus['train_tokens']:,} tokens to train on "
        f"and {corpus['validation_documents']:,} others with {corpus['validation_tokens']:,} tokens held out "
        f"(digest of the tokens: `{corpus['digest']}`). {_DEFAULT_LICENCE if known else _UNKNOWN_LICENCE}"
    )


def _generated_data(run: dict[str, Any], task: dict[str, Any]) -> str:
    meaning = f" Length counts {task['length_meaning']}." if task.get("length_meaning") else ""
    return (
        f"Data: problems of the synthetic task '{run['task']}' with lengths {ranges(task['train_lengths'])}, drawn by "
        f"the training script; no text of anybody.{meaning}"
    )


def _training(run: dict[str, Any], task: dict[str, Any]) -> list[tuple[str, str]]:
    """What this run was trained with: the settings of its task, changed by those of its scheme."""
    if not run["curve"]["step"][-1]:
        rows = [("steps", f"0: the weights are those of `{run['from']}`")]
        return [*rows, ("seed", str(run["seed"])), ("parameters", f"{run['parameters']:,}")]
    own = {name: value for name, value in run.get("training", {}).items() if name != "max_steps"}
    if "learning_rate" in task:
        own = {"learning_rate": task["learning_rate"]} | own
    rows = [
        ("steps", f"{run['curve']['step'][-1]:,}"),
        ("sequences per step", str(own.pop("batch_size", task["batch_size"]))),
    ]
    if task["kind"] != GENERALIZATION:
        rows.append(("tokens per sequence", str(own.pop("train_length", task["train_length"]))))
    rows += [(name, str(value)) for name, value in own.items()]
    rows += [("seed", str(run["seed"])), ("trained parameters", f"{run['parameters']:,}")]
    return [*rows, ("wall time", f"{run['seconds']:.0f} s"), ("processor time", f"{run['cpu_seconds']:.0f} s")]


def _results_text(results: dict[str, Any], run: dict[str, Any], task: dict[str, Any]) -> str:
    if task["kind"] == GENERALIZATION:
        return (
            f"Percent of up to {task['samples']} examples of each length answered without an error; lengths beyond "
            f"{max(task['train_lengths'])} were never seen in training."
        )
    what = "masked tokens" if task["objective"] == "masked" else "tokens"
    lengths = dict.fromkeys(map(str, _trained_lengths(_trainings(results, run), task)))
    return (
        f"Loss of {what} on held-out text in nats, and its exponential, the perplexity. Trained on "
        f"{', then '.join(lengths)} tokens; a model that knows token frequencies only has a loss of "
        f"{task['unigram_cross_entropy']:.3f}."
    )


def _results_table(
    run: dict[str, Any], task: dict[str, Any], item: Aggregate, aggregates: dict[tuple[str, str], Aggregate]
) -> str:
    control = aggregates[run["task"], item.control] if item.control is not None else None
    generated = task["kind"] == GENERALIZATION
    own = run["exact_match"]["accuracy"] if generated else run["by_length"]["loss"]
    digits, factor = (0, 100.0) if generated else (3, 1.0)
    headers = ["length", "exact match" if generated else "loss", f"mean of {item.n} seed{'s' if item.n > 1 else ''}"]
    headers += [f"control `{control.scheme}`"] if control else []
    headers += [] if generated else ["perplexity"]
    rows = []
    for place, length in enumerate(task["lengths"]):
        cells = [str(length), MISSING if own[place] is None else f"{factor * own[place]:.{digits}f}"]
        cells += [
            number((other.accuracy if generated else other.loss)[place], digits, factor)
            for other in (item, control)
            if other is not None
        ]
        perplexity = None if generated else _perplexity(own[place])
        cells += [] if generated else [MISSING if perplexity is None else f"{perplexity:.2f}"]
        rows.append(cells)
    return format_table(headers, rows, markdown=True)


def _results_notes(run: dict[str, Any], task: dict[str, Any], item: Aggregate) -> list[str]:
    notes = []
    if item.n > 1:
        notes.append("± is half of the 95 % interval of the mean over seeds (Student's t).")
    dog = run.get("dog", {})
    if "told_apart" in dog and dog["told_apart"] is not None:
        verdict = "tells" if dog["told_apart"] else "does not tell"
        distance = dog["layers"][-1]
        causal = task.get("objective") != "masked" and not dog["told_apart"] and distance > ROUNDING
        notes.append(
            f"In 'The dog chased another dog' the position encoding {verdict} the two dogs apart; their distance in "
            f"the last layer is {distance:.2g} (relative L2){', which the causal mask alone makes' if causal else ''}."
        )
    return notes


def _limits(
    results: dict[str, Any], run: dict[str, Any], task: dict[str, Any], item: Aggregate, default_text: bool
) -> list[str]:
    trainings = _trainings(results, run)
    steps = sum(trained["curve"]["step"][-1] for trained in trainings)
    limits = [
        f"{run['parameters']:,} parameters and {steps:,} steps of training: nothing it writes is "
        "reliable, and results at this size need not hold at another.",
        "One seed of several; the spread between seeds is in the table above."
        if item.n > 1
        else "One seed: differences from other models that are as small as those between seeds say nothing.",
    ]
    if task["kind"] == GENERALIZATION:
        return [*limits, "It solves one synthetic task and knows no language."]
    longest = max(_trained_lengths(trainings, task))
    limits.append(f"Inputs longer than the {longest} tokens of training are the subject of the experiment.")
    if default_text:
        limits.append("The text is political speech in English, 1790 to today, with the views of its times.")
    return limits


def _eval_results(results: dict[str, Any], run: dict[str, Any], task: dict[str, Any]) -> list[EvalResult]:
    """Every figure of the model itself, for the model-index; a figure that is no number is left out."""
    if task["kind"] == GENERALIZATION:
        figures = [
            ("exact_match", f"Exact match at length {length}", value)
            for length, value in zip(task["lengths"], run["exact_match"]["accuracy"], strict=True)
        ]
        dataset: dict[str, Any] = {
            "dataset_type": "synthetic",
            "dataset_name": f"Synthetic task '{run['task']}', generated",
        }
    else:
        figures = []
        for length, loss in zip(task["lengths"], run["by_length"]["loss"], strict=True):
            figures.append(("loss", f"Loss at {length} tokens", loss))
            perplexity = _perplexity(loss)
            figures.append(
                ("perplexity", f"Perplexity at {length} tokens", None if perplexity is None else round(perplexity, 3))
            )
        corpus = _corpus(results, run)
        known = corpus["source"] == _DEFAULT_SOURCE
        dataset = {
            "dataset_type": DEFAULT_PACKAGE if known else corpus["source"],
            "dataset_name": f"{_DEFAULT_NAME if known else corpus['source']}, held-out documents",
            "dataset_split": "validation",
            "dataset_revision": corpus["digest"],
        }
    kind = pipeline_tag(task["model"]) or "other"
    return [
        EvalResult(task_type=kind, metric_type=metric, metric_name=name, metric_value=value, **dataset)
        for metric, name, value in figures
        if value is not None
    ]


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None or loss > _LARGEST_LOSS else math.exp(loss)
