"""The verb `hf-posenc eval properties`."""

from __future__ import annotations

import argparse
import json


def add_properties(tests: argparse._SubParsersAction[argparse.ArgumentParser], scheme_help: str) -> None:
    """Adds the verb to the tests of `hf-posenc eval`.

    Args:
        tests: the sub-commands of `eval`.
        scheme_help: how a scheme is written.
    """
    parser = tests.add_parser(
        "properties", help="is a scheme unique, relative, linear, bounded, exact in half precision ...? One table."
    )
    parser.add_argument("--schemes", nargs="+", metavar="SCHEME", help=f"{scheme_help} (default: every scheme)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON: every number, threshold and reason")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.set_defaults(run="properties.eval_properties", parser=parser)


def eval_properties(options: argparse.Namespace) -> int:
    """`hf-posenc eval properties`."""
    from hf_posenc.cli.options import parse_scheme
    from hf_posenc.metrics.properties import properties_table

    schemes = None
    if options.schemes is not None:
        names = (name for item in options.schemes for name in ([item] if ":" in item else item.split(",")))
        schemes = [parse_scheme(name) for name in names if name]
    result = properties_table(schemes)
    if options.json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        print(result.table(markdown=options.markdown))
    return 0
