"""The verb `hf-posenc plot`."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from hf_posenc.errors import PositionEncodingError, UsageError


def plot(options: argparse.Namespace) -> int:
    """`hf-posenc plot`: writes the figures of a scheme and prints their paths; `--list` prints what would apply."""
    from hf_posenc.cli.options import parse_scheme
    from hf_posenc.report.tables import format_table

    config = parse_scheme(options.scheme, itertools.chain.from_iterable(options.option))
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; --output takes a folder.")
    try:
        from hf_posenc.plots.schemes import applicable_kinds, plot_scheme, subject_of

        if options.list:
            rows = [[kind.name, kind.summary] for kind in applicable_kinds(subject_of(config))]
            print(format_table(["kind", "what it shows"], rows))
            return 0
        kinds = None if options.kind is None else [name for word in options.kind for name in word.split(",") if name]
        for path in plot_scheme(config, output, kinds):
            print(path)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("matplotlib", "PIL"):
            raise
        raise UsageError("Figures need matplotlib: pip install matplotlib.") from error
    except PositionEncodingError:
        raise
    except ValueError as error:
        raise UsageError(f"Scheme {config.name!r}: {error}") from error
    return 0
