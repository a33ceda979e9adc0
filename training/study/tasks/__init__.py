"""The kinds of tasks of a study, one file for each, and the registry."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from hf_posenc import UnknownNameError
from hf_posenc.metrics.generalization import SYNTHETIC_TASKS
from training.study.settings import TrainingSettings
from training.study.tasks.algorithms import AlgorithmTask, EncoderDecoderTask
from training.study.tasks.embedding import EmbeddingTask
from training.study.tasks.images import ImagesTask
from training.study.tasks.task import StudyTask
from training.study.tasks.text import CausalTask, MaskedTask

CAUSAL, MASKED, EMBEDDING, IMAGES = "causal", "masked", "embedding", "images"
TASKS: dict[str, type[StudyTask]] = {
    CAUSAL: CausalTask,
    MASKED: MaskedTask,
    EMBEDDING: EmbeddingTask,
    IMAGES: ImagesTask,
    **dict.fromkeys(SYNTHETIC_TASKS, AlgorithmTask),
}


def study_task(name: str, settings: TrainingSettings, pretrained: bool = False) -> StudyTask:
    """Returns a task by its name. Synthetic tasks of an encoder-decoder are another kind."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    kind = TASKS[name]
    if kind is AlgorithmTask and settings.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        kind = EncoderDecoderTask
    return kind(name, settings, pretrained)
