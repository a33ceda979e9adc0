"""The verb `hf-posenc eval generalization`."""

from __future__ import annotations

import argparse

from hf_posenc.cli.evaluation_options import add_model_options, chosen_schemes, load, show


def add_generalization(tests: argparse._SubParsersAction[argparse.ArgumentParser], scheme_help: str) -> None:
    """Adds the verb to the tests of `hf-posenc eval`.

    Args:
        tests: the sub-commands of `eval`.
        scheme_help: how a scheme is written.
    """
    parser = tests.add_parser(
        "generalization", help="exact match by length of a model that was trained on a synthetic task"
    )
    add_model_options(parser, scheme_help)
    parser.add_argument(
        "--task",
        required=True,
        metavar="TASK",
        help="repeated_copy, copy, reverse, sorting, addition, reversed_addition, parity, passkey or needle",
    )
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="to test (default: those of the task)")
    parser.add_argument("--samples", type=int, default=100, metavar="N", help="examples per length (default: 100)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="examples per forward (default: 64)")
    parser.add_argument("--generate", action="store_true", help="decode token by token instead of teacher forcing")
    parser.set_defaults(run="generalization.eval_generalization", parser=parser)


def eval_generalization(options: argparse.Namespace) -> int:
    """`hf-posenc eval generalization`."""
    from hf_posenc.metrics.generalization import compare_generalization, get_task

    schemes = chosen_schemes(options)
    task = get_task(options.task)
    model, tokenizer = load(options)
    return show(
        compare_generalization(
            model,
            tokenizer,
            task,
            options.lengths,
            schemes,
            samples=options.samples,
            seed=options.seed,
            method="generate" if options.generate else "teacher_forced",
            batch_size=options.batch_size,
        ),
        options,
    )
