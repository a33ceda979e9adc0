"""The verb `hf-posenc eval minimal-pairs`."""

from __future__ import annotations

import argparse

from hf_posenc.cli.evaluation_options import add_model_options, chosen_schemes, load, show


def add_minimal_pairs(tests: argparse._SubParsersAction[argparse.ArgumentParser], scheme_help: str) -> None:
    """Adds the verb to the tests of `hf-posenc eval`.

    Args:
        tests: the sub-commands of `eval`.
        scheme_help: how a scheme is written.
    """
    parser = tests.add_parser(
        "minimal-pairs", help="does the model prefer the grammatical of two texts? Files of BIG-bench"
    )
    add_model_options(parser, scheme_help)
    parser.add_argument(
        "--task", required=True, metavar="FILE", help="a JSON task of BIG-bench, or a folder with a task.json"
    )
    parser.add_argument(
        "--samples", type=int, default=500, metavar="N", help="pairs, drawn with --seed; 0 is all (default: 500)"
    )
    parser.set_defaults(run="minimal_pairs.eval_minimal_pairs", parser=parser)


def eval_minimal_pairs(options: argparse.Namespace) -> int:
    """`hf-posenc eval minimal-pairs`."""
    from hf_posenc.metrics.minimal_pairs import minimal_pairs_accuracy, read_minimal_pairs

    schemes = chosen_schemes(options)
    task = read_minimal_pairs(options.task)
    model, tokenizer = load(options)
    samples = None if options.samples == 0 else options.samples
    return show(minimal_pairs_accuracy(model, tokenizer, task, schemes, samples=samples, seed=options.seed), options)
