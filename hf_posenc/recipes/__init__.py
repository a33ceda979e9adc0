"""Training with schemes: parameter groups for an optimizer, and schemes that change while training."""

from hf_posenc.recipes.callback import SchemePhasesCallback
from hf_posenc.recipes.parameter_groups import parameter_groups
from hf_posenc.recipes.phases import SchemePhases, drope

__all__ = ["SchemePhases", "SchemePhasesCallback", "drope", "parameter_groups"]
