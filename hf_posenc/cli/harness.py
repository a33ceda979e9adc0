"""The verb `hf-posenc lm-eval`."""

from __future__ import annotations

import argparse

#: Its options are lm-eval's, which argparse cannot pass through where they come first.
VERB = "lm-eval"


def add_harness(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb to those of `hf-posenc`."""
    parser = verbs.add_parser(
        VERB, help="run lm-evaluation-harness with patched models (all options are those of lm-eval)", add_help=False
    )
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run="harness.lm_eval", parser=parser)


def lm_eval(options: argparse.Namespace) -> int:
    """`hf-posenc lm-eval`."""
    from hf_posenc.integrations.lm_eval import run

    run(options.arguments)
    return 0
