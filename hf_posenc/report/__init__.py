"""Measurements as records, and their output as tables, Markdown and JSON."""

from hf_posenc.report.combination import combine_results
from hf_posenc.report.records import Quantity, Record, Result, Subject, View

__all__ = ["Quantity", "Record", "Result", "Subject", "View", "combine_results"]
