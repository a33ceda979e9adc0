"""The synthetic tasks by name."""

from __future__ import annotations

from hf_posenc.errors import UnknownNameError
from hf_posenc.metrics.generalization.arithmetic import AdditionTask, ParityTask
from hf_posenc.metrics.generalization.rearranging import CopyTask, RepeatedCopyTask, ReverseTask, SortingTask
from hf_posenc.metrics.generalization.retrieval import NeedleTask, PasskeyTask
from hf_posenc.metrics.generalization.task import SyntheticTask

_TEN = tuple(range(1, 11))
_PAST_TEN = (5, 10, 11, 12, 13, 14, 16, 20, 30, 40)

#: Every task by its name.
SYNTHETIC_TASKS: dict[str, SyntheticTask] = {
    task.name: task
    for task in (
        RepeatedCopyTask("repeated_copy", train_lengths=_TEN, test_lengths=_PAST_TEN),
        CopyTask("copy", train_lengths=_TEN, test_lengths=_PAST_TEN),
        ReverseTask("reverse", train_lengths=_TEN, test_lengths=_PAST_TEN),
        SortingTask("sorting", train_lengths=_TEN, test_lengths=_PAST_TEN),
        AdditionTask("addition", train_lengths=tuple(range(1, 7)), test_lengths=(3, 6, 7, 8, 9, 12, 16, 24)),
        AdditionTask(
            "reversed_addition",
            train_lengths=tuple(range(1, 7)),
            test_lengths=(3, 6, 7, 8, 9, 12, 16, 24),
            reversed_answer=True,
        ),
        ParityTask("parity", train_lengths=tuple(range(1, 21)), test_lengths=(10, 20, 21, 22, 25, 30, 40, 60, 80)),
        PasskeyTask("passkey", train_lengths=tuple(range(4, 21)), test_lengths=(10, 20, 22, 25, 30, 40, 60, 80)),
        NeedleTask("needle", train_lengths=tuple(range(1, 9)), test_lengths=(4, 8, 9, 10, 12, 16, 24, 32)),
    )
}


def get_task(task: str | SyntheticTask) -> SyntheticTask:
    """The task of a name; a task is returned as it is.

    Raises:
        UnknownNameError: if there is no task of that name.
    """
    if isinstance(task, SyntheticTask):
        return task
    if task not in SYNTHETIC_TASKS:
        raise UnknownNameError("synthetic task", task, SYNTHETIC_TASKS)
    return SYNTHETIC_TASKS[task]
