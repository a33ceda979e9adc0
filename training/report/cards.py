"""Model cards: one for each scheme of a task with saved models, for all its seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard

from hf_posenc.checkpoint.cards import card_data, loading_section, pipeline_tag, scheme_section
from hf_posenc.metrics.images.pictures import DIGITS_SOURCE
from hf_posenc.report import Record, Result
from training.data.loading import DEFAULT_PACKAGE
from training.report.results import MAIN, Run, Study

TEMPLATE = Path(__file__).resolve().parents[2] / "model_cards" / "template.md"
_AIMS = {
    "causal": "predict the next token", "masked": "fill in masked tokens", "embedding": "keep its embeddings",
    "images": "classify pictures",
}  # fmt: skip
#: Type and name of a result in the model-index, by quantity, or by quantity and the key of `Record.at`.
_METRICS: dict[Any, tuple[str, str]] = {
    ("accuracy", "resolution"): ("accuracy", "Accuracy at {resolution} pixels"),
    "loss": ("loss", "Loss at {length} tokens"),
    "perplexity": ("perplexity", "Perplexity at {length} tokens"),
    "accuracy": ("exact_match", "Exact match at length {length}"),
    "similarity": ("cosine_similarity", "Cosine at {length} tokens"),
}


class SchemeCard(NamedTuple):
    """The card of one scheme in one task: its name, the folders of the models, one per seed, and the text."""

    name: str
    models: list[str]
    text: str


def study_cards(study: Study, records: Mapping[str, Result]) -> list[SchemeCard]:
    """Returns a card for each scheme of each task that saved a model."""
    cards = []
    for result in records.values():
        for label in result.labels:
            runs = [run for run in study.of(result.task, label) if run.model is not None]
            if runs:
                name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', study.name)}-{result.task}-{label}"
                models = [str(run.model) for run in runs]
                cards.append(SchemeCard(name, models, f"{_card(study, result, runs, name, models).content.rstrip()}\n"))
    return cards


def _card(study: Study, result: Result, runs: list[Run], name: str, models: list[str]) -> ModelCard:
    task, first = study.tasks[result.task], runs[0]
    corpus = study.corpus if task.kind in ("language_modeling", "embedding") else None
    default_text = corpus is not None and corpus["source"] == f"Python package {DEFAULT_PACKAGE}"
    own_pictures = task.pictures is not None and task.pictures["source"] != DIGITS_SOURCE
    own_data = own_pictures or (corpus is not None and not default_text)
    dataset: dict[str, Any] = {"dataset_type": "synthetic", "dataset_name": f"Synthetic task '{result.task}'"}
    if read := task.pictures or corpus:
        source = DEFAULT_PACKAGE if default_text else read["source"]
        dataset = {"dataset_type": source, "dataset_name": source, "dataset_revision": read["digest"]}
    data = card_data(
        name,
        task.model,
        first.config["scheme"] if first.config is not None else "unpatched",
        tags=[result.task.replace("_", "-")],
        # The licence of the models depends on that of the data, which is unknown if it is the user's.
        license="apache-2.0" if task.pretrained is None and not own_data else None,
        language="en" if default_text else None,
        eval_results=[
            EvalResult(
                task_type=pipeline_tag(task.model) or "other",
                metric_type=_metric(record)[0],
                metric_name=_metric(record)[1].format(**record.at),
                metric_value=round(record.value, 4),
                metric_args={"seeds": record.count} if (record.count or 0) > 1 else None,
                **dataset,
            )
            for length in task.lengths
            for quantity in (MAIN[task.kind], "perplexity")
            for record in result.of(first.scheme, quantity, **{task.axis: length})
            if record.value is not None
        ],
    )
    control = result.settings["control"]
    compared = [subject for subject in result.subjects if subject.label in (first.scheme, control)]
    labels = [subject.label for subject in compared]
    shown = [record for record in result.records if record.subject in labels]
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        study=study,
        task=task,
        task_name=result.task,
        run=first,
        seeds=", ".join(str(run.seed) for run in runs),
        aim=_AIMS.get(result.task, f"solve the synthetic task '{result.task}'"),
        scheme=scheme_section(first.config, task.model) if first.config is not None else "",
        corpus=corpus,
        default_text=default_text,
        own_data=own_data,
        results=replace(result, title="", subjects=tuple(compared), records=tuple(shown)).table(markdown=True),
        control=control,
        loading=loading_section(
            models[0], task.model, patched=first.config is not None, tokenizer=task.pictures is None
        ),
        models=models,
    )


def _metric(record: Record) -> tuple[str, str]:
    """Returns the type and name of a number in the model-index."""
    return _METRICS.get((record.quantity, next(iter(record.at), ""))) or _METRICS[record.quantity]
