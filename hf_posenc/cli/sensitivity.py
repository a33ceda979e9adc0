"""The verb `hf-posenc eval sensitivity`."""

from __future__ import annotations

import argparse

from hf_posenc.cli.evaluation_options import add_model_options, chosen_schemes, load, read_texts, show


def add_sensitivity(tests: argparse._SubParsersAction[argparse.ArgumentParser], scheme_help: str) -> None:
    """Adds the verb to the tests of `hf-posenc eval`.

    Args:
        tests: the sub-commands of `eval`.
        scheme_help: how a scheme is written.
    """
    parser = tests.add_parser(
        "sensitivity", help="repeated words at many gaps, exchanged roles, a shuffled context, shifted positions"
    )
    add_model_options(parser, scheme_help)
    parser.add_argument("--gaps", nargs="+", type=int, metavar="N", help="tokens from a word to its repetition")
    parser.add_argument("--offsets", nargs="+", type=int, metavar="N", help="what is added to every position")
    parser.add_argument("--context", type=int, default=48, metavar="N", help="tokens that are shuffled (default: 48)")
    parser.add_argument("--text", metavar="FILE", help="text to shuffle and to shift (default: a short English one)")
    parser.set_defaults(run="sensitivity.eval_sensitivity", parser=parser)


def eval_sensitivity(options: argparse.Namespace) -> int:
    """`hf-posenc eval sensitivity`."""
    from hf_posenc.metrics.sensitivity import sensitivity_test

    schemes = chosen_schemes(options)
    text = None if options.text is None else "\n".join(read_texts([options.text]))
    model, tokenizer = load(options)
    given = {name: value for name in ("gaps", "offsets") if (value := getattr(options, name)) is not None}
    return show(
        sensitivity_test(model, tokenizer, schemes, context=options.context, text=text, seed=options.seed, **given),
        options,
    )
