"""Trackers of experiments, which transformers' Trainer reports to."""

from __future__ import annotations

from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from training.errors import SettingsError
from training.study.settings import StudySettings


def check_trackers(study: StudySettings) -> None:
    """Refuses a tracker that does not exist or is not installed, before anything is trained.

    Raises:
        SettingsError: in the words of transformers.
    """
    names = study.report_to
    try:
        # A single word may be "all" or "none".
        for callback in get_reporting_integration_callbacks(names[0] if len(names) == 1 else names):
            callback()
    except (ValueError, ImportError, RuntimeError) as error:
        raise SettingsError(f"--report_to: {error}") from error


def finish_trackers(arguments: TrainingArguments) -> None:
    """Closes what `Trainer` leaves open, so that the next training of this process has a run of its own."""
    if "wandb" in arguments.report_to:
        import wandb

        wandb.finish()
