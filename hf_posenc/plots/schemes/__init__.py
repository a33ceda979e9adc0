"""Figures of a scheme, made from its parts alone: a scheme of anybody's gets every kind that applies to it."""

from hf_posenc.plots.schemes.catalogue import KINDS, applicable_kinds, draw_kind, kind_named, plot_scheme
from hf_posenc.plots.schemes.drawing import FigureKind
from hf_posenc.plots.schemes.subject import Subject, subject_of

__all__ = ["KINDS", "FigureKind", "Subject", "applicable_kinds", "draw_kind", "kind_named", "plot_scheme", "subject_of"]
