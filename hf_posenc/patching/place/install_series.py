"""Placing the parts of a stack that reads features at the modules that add positions to its embeddings."""

from __future__ import annotations

from hf_posenc.patching.call.series.input_view import InputView
from hf_posenc.patching.call.series.vector_site import ParameterSite, site_of, weights_of
from hf_posenc.patching.find.sites import Stack
from hf_posenc.patching.place.journal import Journal
from hf_posenc.patching.place.report import StackReport
from hf_posenc.patching.place.stack_encoding import StackEncoding

_DESCRIPTIONS = {
    "convolution": "convolution over neighbours in place of positions",
    "sinusoids": "sinusoids of positions",
}
_NEIGHBOURS = (
    "convolutions mix neighbouring frames before or between the layers of attention, so the order of the input still "
    "shows without positions"
)


def install_series(stack: Stack, encoding: StackEncoding, journal: Journal, report: StackReport) -> None:
    """Puts the vectors of the scheme in place of those of the architecture. The first module gets them."""
    series, runtime = stack.series, encoding.runtime
    assert series is not None
    additive = None if stack.tables else encoding.additive
    if series.fixed_input is not None:
        runtime.input_view = InputView(stack.module, series.fixed_input, runtime)
    for found in series.vectors:
        journal.set_forward(found.module, site_of(found, runtime, additive))
        for owner, name in weights_of(found.module):
            journal.freeze(owner, name)
        report.replaced.append(f"{found.path}: {_DESCRIPTIONS[found.kind]} ({type(found.module).__name__})")
        if additive is not None:
            report.placed.append(f"additive: {found.path}")
        additive = None
    for table in series.parameters:
        journal.set_forward(table.module, ParameterSite(table, runtime, additive))
        journal.freeze(table.module, table.name)
        report.replaced.append(f"{table.full_name}: position table ({type(table.module).__name__})")
        if additive is not None:
            report.placed.append(f"additive: {table.full_name}")
        additive = None
    if series.mixes_neighbours:
        report.kept.append(_NEIGHBOURS)
