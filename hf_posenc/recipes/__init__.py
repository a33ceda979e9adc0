"""Training recipes: fitted initialization, schemes that change during training, healing, parameter groups."""

from hf_posenc.recipes.distillation import (
    Distillation,
    frozen_teacher,
    hidden_state_loss,
    mean_pooled,
    soft_target_loss,
)
from hf_posenc.recipes.gradual import GradualSwapCallback, begin_blend, blend_strength, finish_blend, set_blend_strength
from hf_posenc.recipes.perturbed_positions import PerturbedSelfDistillation, reverse_divergence
from hf_posenc.recipes.phases import SchemePhases, SchemePhasesCallback, drope
from hf_posenc.recipes.skipped_positions import perturbed_positions, pose_positions
from hf_posenc.recipes.spectrum_candidates import SpectrumCandidate
from hf_posenc.recipes.spectrum_search import SpectrumSearch, search_spectrum
from hf_posenc.recipes.swap import Swap, swap_scheme
from hf_posenc.recipes.trained_parameters import add_lora, parameter_groups

__all__ = [
    "Distillation",
    "GradualSwapCallback",
    "PerturbedSelfDistillation",
    "SchemePhases",
    "SchemePhasesCallback",
    "SpectrumCandidate",
    "SpectrumSearch",
    "Swap",
    "add_lora",
    "begin_blend",
    "blend_strength",
    "drope",
    "finish_blend",
    "frozen_teacher",
    "hidden_state_loss",
    "mean_pooled",
    "parameter_groups",
    "perturbed_positions",
    "pose_positions",
    "reverse_divergence",
    "search_spectrum",
    "set_blend_strength",
    "soft_target_loss",
    "swap_scheme",
]
