"""Figures of a scheme. They use only its parts, so third-party schemes get every kind of figure that applies."""

from hf_posenc.plots.schemes.catalogue import KINDS, applicable_kinds, draw_kind, kind_named, plot_scheme
from hf_posenc.plots.schemes.drawing import FigureKind
from hf_posenc.plots.schemes.subject import Subject, subject_of

__all__ = ["KINDS", "FigureKind", "Subject", "applicable_kinds", "draw_kind", "kind_named", "plot_scheme", "subject_of"]
