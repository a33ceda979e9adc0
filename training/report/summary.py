"""A summary of a study, in sentences that claim no more than its seeds allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from hf_posenc.metrics.dog import PROBE_TOLERANCE, SENTENCE
from hf_posenc.report import Result
from training.report.records import ROUNDING, half_width
from training.report.results import MAIN, Study, Task

#: A loss that rises by at most this many nats after the trained length counts as kept.
KEPT = 0.05
#: If a loss differs from that of token frequencies by at most this, hardly anything was learned.
_HARDLY = 0.1
_WORDS = {
    "loss": ("the lowest loss was", "{:.3f}"),
    "similarity": ("the highest cosine was", "{:.3f}"),
    "accuracy": ("the largest share of right answers was", "{:.0%}"),
}
_AIMS = {"causal": "which predicts the next token", "masked": "which fills in masked tokens"}


def study_summary(study: Study, records: Mapping[str, Result]) -> dict[str, list[str]]:
    """Returns sentences on the whole study, under an empty name, and on each of its tasks. Code is in backticks."""
    return {"": list(_whole(study))} | {name: list(_task(study, result)) for name, result in records.items()}


def _whole(study: Study) -> Iterator[str]:
    finished = [run for run in study.runs if run.finished]
    schemes, seeds = ({getattr(run, key) for run in study.runs} for key in ("scheme", "seed"))
    pretrained = next((task.pretrained for task in study.tasks.values() if task.pretrained), None)
    start = f"The pretrained model {pretrained} was trained further" if pretrained else "A small model was trained"
    size = ", ".join(
        _count(*counted) for counted in ((len(schemes), "scheme"), (len(study.tasks), "task"), (len(seeds), "seed"))
    )
    yield (
        f"{start} for each scheme (a position encoding with its settings), task and seed: {size}. {len(finished)} of "
        f"{len(study.runs)} training runs finished."
    )
    machine, gpu = study.machine, study.machine.get("gpu")
    clock = [run.seconds if gpu else run.cpu_seconds for run in finished]
    minutes = sum(seconds for seconds in clock if seconds is not None) / 60
    if minutes and None not in clock:
        place = gpu or f"{_count(machine.get('cores', 1), 'core')} of {machine.get('cpu', 'a CPU')}"
        yield f"The training steps took {minutes:.1f} minutes{'' if gpu else ' of processor time'}, on {place}."
    if len(seeds) == 1:
        yield "With one seed, a difference between two schemes may be chance, so it cannot be judged."
    else:
        yield (
            "A difference is called clear if its 95 % interval over the seeds (paired by seed, not corrected for the "
            "number of comparisons) does not contain zero."
        )


def _task(study: Study, result: Result) -> Iterator[str]:
    task = study.tasks[result.task]
    quantity, limit = MAIN[task.kind], max(task.trained)
    values = _comparable(study, result, quantity)
    aim = _AIMS.get(task.objective or "")
    yield f"**{result.task}** (a {task.model}{f', {aim}' if aim else ''})."
    if task.axis == "resolution":
        for resolution in task.lengths:
            place = f"At {resolution} pixels{', the resolution of training' if resolution in task.trained else ''}"
            yield from _best(values, quantity, resolution, place, "{:.1%}")
        yield from _dogs(task, result)
        return
    short, far = max((value for value in task.lengths if value <= limit), default=task.lengths[0]), task.lengths[-1]
    if task.kind == "generalization":
        yield from _best(values, quantity, far, f"At length {far} (trained up to {limit})")
    else:
        place = (
            f"At the trained length of {short} tokens" if short in task.trained else f"At a length of {short} tokens"
        )
        yield from _best(values, quantity, short, place)
    if quantity == "loss":
        frequencies = task.unigram_cross_entropy or math.inf
        means = {label: fmean(reading[short].values()) for label, reading in values.items() if short in reading}
        failed = [label for label, mean in means.items() if mean - frequencies > _HARDLY]
        ignorant = [label for label, mean in means.items() if abs(mean - frequencies) <= _HARDLY]
        level = f"how often each token occurs, which alone gives a loss of {frequencies:.3f} nats per token"
        losses = {label: f" ({mean:.3f})" for label, mean in means.items()}
        if ignorant:
            yield f"{_quoted(ignorant, losses)} learned little more than {level}."
        if failed:
            yield f"{_quoted(failed, losses)} did worse than a model that only knows {level}."
        ignorant += failed
        if far > short:
            yield from _past({label: reading for label, reading in values.items() if label not in ignorant}, short, far)
    yield from _dogs(task, result)


def _comparable(study: Study, result: Result, quantity: str) -> dict[str, dict[int, dict[int, float]]]:
    """Returns values by label, length and seed of schemes trained alike: not from another scheme, and not longer."""
    comparable: dict[str, dict[int, dict[int, float]]] = {}
    for run in study.of(result.task):
        alike = run.start is None and "train_length" not in run.training
        for length, value in zip(run.reading.get("lengths", ()), run.reading.get(quantity, ()), strict=False):
            if alike and value is not None:
                comparable.setdefault(run.scheme, {}).setdefault(length, {})[run.seed] = value
    return comparable


def _best(
    values: Mapping[str, dict[int, dict[int, float]]], quantity: str, length: int, place: str, style: str = ""
) -> Iterator[str]:
    """Names the best scheme and the next one, and says whether the seeds separate the two."""
    better = -1 if quantity == "loss" else 1
    means = {label: fmean(reading[length].values()) for label, reading in values.items() if reading.get(length)}
    order = sorted(means, key=lambda label: -better * means[label])
    if not order:
        return
    words, usual = _WORDS[quantity]
    style = style or usual
    shown = {label: style.format(means[label]) for label in order}
    # Schemes with the same printed number share a rank.
    if quantity == "accuracy" and means[order[0]] == 0:
        yield f"{place}, no scheme gave a right answer."
        return
    first = [label for label in order if shown[label] == shown[order[0]]]
    text = f"{place}, {words} that of {_quoted(first)} ({shown[first[0]]})"
    rest = order[len(first) :]
    if not rest:
        yield f"{text}."
        return
    second = [label for label in rest if shown[label] == shown[rest[0]]]
    best, other = values[first[0]][length], values[second[0]][length]
    gaps = [better * (best[seed] - other[seed]) for seed in best if seed in other]
    judged = "The seeds do not show which is better."
    if len(gaps) < 2:
        judged = "One seed is not enough to rank them." if gaps else "They have no seed in common to compare."
    elif len(gaps) > 2 and fmean(gaps) > (half_width(gaps) or 0.0):
        judged = "The difference is clear."
    yield f"{text}; next came {_quoted(second)} ({shown[second[0]]}). {judged}"


def _past(values: Mapping[str, dict[int, dict[int, float]]], short: int, far: int) -> Iterator[str]:
    """Says which schemes kept their loss at the longest length."""
    kept: list[str] = []
    open_: list[str] = []
    lost: dict[str, tuple[float, float]] = {}
    for label, reading in values.items():
        seeds = [seed for seed in reading.get(short, {}) if seed in reading.get(far, {})]
        if not seeds:
            continue
        rises = [reading[far][seed] - reading[short][seed] for seed in seeds]
        rise, half = fmean(rises), half_width(rises) or 0.0
        if rise + half <= KEPT:
            kept.append(label)
        elif rise - half > KEPT:
            lost[label] = (fmean(reading[short][seed] for seed in seeds), fmean(reading[far][seed] for seed in seeds))
        else:
            open_.append(label)
    told: list[str] = []
    if kept:
        told.append(f"{_quoted(kept)} kept {'its' if len(kept) == 1 else 'their'} loss (a rise of at most {KEPT} nats)")
    if lost:
        most = max(lost, key=lambda label: lost[label][1] - lost[label][0])
        change = "from {:.3f} to {:.3f}".format(*lost[most])
        others = f", most of all `{most}`" if len(lost) > 1 else ""
        more = "by more" if kept else f"by more than {KEPT} nats"
        told.append(f"the loss rose {more} for {_quoted(list(lost))}{others} ({change})")
    if open_:
        told.append(f"for {_quoted(open_)} the seeds do not show whether it rose")
    if told:
        yield f"On texts of {far} tokens, {far / short:g} times as long, {'; '.join(told)}."


def _dogs(task: Task, result: Result) -> Iterator[str]:
    """Says which schemes distinguish the two dogs. A causal mask alone does, so attention without a mask is used."""
    causal = task.causal_reader
    quantity, limit = ("dog_probe", PROBE_TOLERANCE) if causal else ("dog_distance", ROUNDING)
    last = {record.subject: record.value for record in result.of(quantity=quantity) if record.value is not None}
    if not last:
        return
    same = [label for label, value in last.items() if value <= limit]
    where = "After one random attention layer without a causal mask" if causal else f"In \u201c{SENTENCE}\u201d"
    if task.pictures is not None:
        where = "In a picture with two equal dogs"
    dogs = f"the two dogs of \u201c{SENTENCE}\u201d" if causal else "the two dogs"
    if same:
        others = "; every other scheme can" if len(same) < len(last) else ""
        yield f"{where}, {_quoted(same)} cannot tell {dogs} apart{others}."
    else:
        yield f"{where}, every scheme tells {dogs} apart."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _quoted(names: Sequence[str], behind: Mapping[str, str] | None = None) -> str:
    *first, last = [f"`{name}`{(behind or {}).get(name, '')}" for name in names]
    return f"{', '.join(first)} and {last}" if first else last
