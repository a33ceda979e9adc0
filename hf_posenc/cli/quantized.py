"""The verb `hf-posenc eval quantized`."""

from __future__ import annotations

import argparse

from hf_posenc.cli.evaluation_options import add_model_options, chosen_schemes, load, read_texts, show


def add_quantized(tests: argparse._SubParsersAction[argparse.ArgumentParser], scheme_help: str) -> None:
    """Adds the verb to the tests of `hf-posenc eval`.

    Args:
        tests: the sub-commands of `eval`.
        scheme_help: how a scheme is written.
    """
    parser = tests.add_parser("quantized", help="the loss with only positions, encodings or keys in low precision")
    add_model_options(parser, scheme_help)
    parser.add_argument(
        "--text", nargs="+", metavar="FILE", help="text files, or folders of .txt files (default: a short English text)"
    )
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens per sequence (default: 128)")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="sequences (default: 4)")
    parser.add_argument(
        "--positions", nargs="+", type=int, metavar="N", help="where in the context they stand (default: 0 1024 4096)"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        help="what is held in low precision, such as 'ids bfloat16' (default: all)",
    )
    parser.set_defaults(run="quantized.eval_quantized", parser=parser)


def eval_quantized(options: argparse.Namespace) -> int:
    """`hf-posenc eval quantized`."""
    from hf_posenc.metrics.quantization import quantization_test
    from hf_posenc.metrics.sensitivity import ENGLISH

    schemes = chosen_schemes(options)
    texts = [ENGLISH.passage] if options.text is None else read_texts(options.text)
    model, tokenizer = load(options)
    given = {name: value for name in ("positions", "variants") if (value := getattr(options, name)) is not None}
    result = quantization_test(
        model,
        tokenizer,
        texts,
        schemes,
        length=options.length,
        max_windows=options.samples,
        seed=options.seed,
        **given,
    )
    return show(result, options)
