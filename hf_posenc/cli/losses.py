"""The verb `hf-posenc eval loss`."""

from __future__ import annotations

import argparse

from hf_posenc.cli.evaluation_options import add_model_options, check_plot, chosen_schemes, load, read_texts, show


def add_loss(tests: argparse._SubParsersAction[argparse.ArgumentParser], scheme_help: str) -> None:
    """Adds the verb to the tests of `hf-posenc eval`.

    Args:
        tests: the sub-commands of `eval`.
        scheme_help: how a scheme is written.
    """
    parser = tests.add_parser("loss", help="loss and perplexity by length and by position, on held-out text")
    add_model_options(parser, scheme_help)
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="text files, or folders of .txt files")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=[128, 512, 1024],
        metavar="N",
        help="in tokens (default: 128 512 1024)",
    )
    parser.add_argument(
        "--samples", type=int, default=16, metavar="N", help="windows of text of the longest length (default: 16)"
    )
    parser.add_argument(
        "--window", type=int, metavar="N", help="beside it, a sliding window of N tokens (default: none)"
    )
    parser.add_argument("--stride", type=int, metavar="N", help="of the sliding window (default: half of it)")
    parser.add_argument("--no-special-tokens", action="store_true", help="without BOS, [CLS] and [SEP] around a piece")
    parser.add_argument(
        "--mask-probability", type=float, default=0.15, metavar="P", help="of masked models (default: 0.15)"
    )
    parser.add_argument(
        "--tokens-per-batch", type=int, default=4096, metavar="N", help="tokens per forward call (default: 4096)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a figure of the loss by length and by position")
    parser.set_defaults(run="losses.eval_loss", parser=parser)


def eval_loss(options: argparse.Namespace) -> int:
    """`hf-posenc eval loss`."""
    from hf_posenc.cli.errors import UsageError
    from hf_posenc.metrics.language_modeling import text_losses

    if options.stride is not None and options.window is None:
        raise UsageError("--stride is that of the sliding window; give --window too.")
    schemes = chosen_schemes(options)
    check_plot(options)
    texts = read_texts(options.text)
    model, tokenizer = load(options)
    result = text_losses(
        model,
        tokenizer,
        texts,
        options.lengths,
        schemes,
        max_windows=options.samples,
        sliding_window=options.window,
        stride=options.stride,
        special_tokens=not options.no_special_tokens,
        mask_probability=options.mask_probability,
        tokens_per_batch=options.tokens_per_batch,
        seed=options.seed,
    )
    if options.plot is not None:
        from hf_posenc.plots.losses import plot_losses

        plot_losses(result, options.plot)
    return show(result, options)
