"""Writes docs/reference/architectures.md by running every check of tests/architectures on every architecture.

python docs/generate/architectures.py            # everything, a few minutes on two cores
python docs/generate/architectures.py --only llama bert --no-write
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

from hf_posenc.report.tables import markdown_table  # noqa: E402
from tests.architectures.checks import SCHEMES, check_pair  # noqa: E402
from tests.architectures.findings import NATIVE_BOUND, SAME_BOUND  # noqa: E402
from tests.architectures.population import Pair, all_pairs  # noqa: E402

KINDS = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Encoder-decoders",
    "encoder": "Encoders",
}
#: A server that has imported everything forks for each architecture.
_CONTEXT = multiprocessing.get_context("forkserver")

#: `Record.to_dict`, or the pair and why its process died.
FoundRecord = dict[str, Any]


def main() -> int:
    """Runs the sweep; returns 1 if a process died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, help="model types to run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds per architecture")
    parser.add_argument("--json", type=Path, default=None, help="write the raw findings here as well")
    parser.add_argument("--no-write", action="store_true", help="print failures only")
    arguments = parser.parse_args()
    pairs = [pair for pair in all_pairs() if arguments.only is None or pair.model_type in arguments.only]
    _CONTEXT.set_forkserver_preload(["tests.architectures.checks"])
    # One that dies or hangs costs one row only.
    with ThreadPoolExecutor(arguments.processes) as pool:
        records = list(pool.map(lambda pair: _in_a_process(pair, arguments.timeout), pairs))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(records, indent=1))
    print("\n".join(_listed(records, "fail")))
    if not arguments.no_write:
        (ROOT / "docs" / "reference" / "architectures.md").write_text(document(records))
    return int(any("died" in record for record in records))


def _in_a_process(pair: Pair, timeout: float) -> FoundRecord:
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(pair, sender), daemon=True)
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(timeout) else {"died": f"no answer after {timeout:.0f} s"}
    except EOFError:
        found = {"died": "the process died"}
    process.kill()
    process.join()
    return {"pair": pair.name} | found


def _run(pair: Pair, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        sender.send(check_pair(pair).to_dict())
    except Exception:
        # Building and calling somebody else's model may raise anything: the sweep goes on, the row holds the traceback,
        # and the exit status says that a process died.
        sender.send({"died": traceback.format_exc(limit=-4)})


def document(records: list[FoundRecord]) -> str:
    """The page."""
    tables = [
        f"## {title}\n\n" + _table([record for record in records if record["pair"].startswith(f"{kind}-")])
        for kind, title in KINDS.items()
    ]
    refused = [(record["pair"], record["refusal"]) for record in records if record.get("refusal")]
    return "\n\n".join(
        (
            _introduction(),
            _summary(records),
            *tables,
            "## Refused\n\n`UnsupportedError` with every scheme; the model is left unchanged.",
            markdown_table(("architecture", "reason"), refused),
            "## Refused in part",
            "\n".join(_listed(records, "refused") or ["Nothing."]),
            "## What fails",
            "\n".join(_listed(records, "fail") or ["Nothing."]) + "\n",
        )
    )


def _introduction() -> str:
    return f"""# Architectures

<!-- Written by docs/generate/architectures.py. Edits are lost. -->

Written by `python docs/generate/architectures.py`, which builds a tiny random model (64 wide, 4 heads, window 8, every
gate open) of each text architecture in transformers' causal-LM and masked-LM mappings, of encoder-decoders, and of
variants that a default config hides, and runs the checks in `tests/architectures/checks.py` for each scheme. Last run:
transformers {transformers.__version__}, torch {torch.__version__.split("+")[0]}, float32 on a CPU.

A cell says `yes` if every check passes:

- **native**: `patch_model(model, native_scheme(model))` gives the stock logits to {NATIVE_BOUND:g} of their
  standard deviation;
- **none**: the outputs differ from stock, do not depend on the order of tokens (last token of a one-layer causal model,
  or any bidirectional model; {SAME_BOUND:g}), and attention still depends on content;
- **alibi, t5, rope (theta 100), sinusoidal**: the outputs differ from stock and from `none`, in every layer taken alone
  (`sinusoidal` acts before the layers), and depend on the order of tokens in one layer;
- **forget_gate** (caches its gates with the keys), **shaw** (reads queries), **pope** (doubles the width of queries and
  keys): the same. `-` stands for a scheme that is refused in an encoder;
- all of them: decoding with a dynamic and with a static cache, left padding, and eager attention give the logits of the
  full, unpadded, default forward ({SAME_BOUND:g}); `unpatch_model` gives bit-equal logits and leaves no trace on
  weights, instances, classes, modules or the config.

A check that the stock model fails too does not count as a failure; the last column names it. A refusal, which is an
`UnsupportedError` instead of a wrong answer, does not count either; it is listed under "Refused in part"."""


def _summary(records: list[FoundRecord]) -> str:
    placed = [record for record in records if not record.get("refusal")]
    rows = []
    for kind, title in (KINDS | {"": "all"}).items():
        own = [record for record in placed if record["pair"].startswith(kind)]
        count = sum(record["pair"].startswith(kind) for record in records)
        passed = [sum(_passes(record, scheme) for record in own) for scheme in SCHEMES]
        cells = [f"{one} ({100 * one / max(len(own), 1):.1f} %)" for one in passed]
        rows.append((title, str(count), str(count - len(own)), str(len(own)), *cells))
    whole = sum(all(_passes(record, scheme) for scheme in SCHEMES) for record in placed)
    share = 100 * whole / max(len(placed), 1)
    table = markdown_table(("kind", "architectures", "refused", "with a scheme", *SCHEMES), rows)
    return f"## Summary\n\n{table}\n\nIn every column: {whole} of {len(placed)} ({share:.1f} %)."


def _table(records: list[FoundRecord]) -> str:
    rows = []
    for record in records:
        if not record.get("refusal"):
            findings = record.get("findings", {})
            native = record.get("native", "")
            limits = [name for name, one in findings.get("none", {}).items() if one["verdict"] == "stock"]
            cells = []
            for scheme in SCHEMES:
                refused = findings.get(scheme, {}).get("patch", {}).get("verdict") == "refused"
                cells.append("-" if refused else "yes" if _passes(record, scheme) else "**no**")
            name = record["pair"].split("-", 1)[1]
            rows.append((name, "no name" if native.startswith("(") else native, *cells, ", ".join(limits) or "-"))
    return markdown_table(("architecture", "native scheme", *SCHEMES, "the stock model itself fails"), rows)


def _listed(records: list[FoundRecord], verdict: str) -> list[str]:
    """A line for each architecture and finding of a verdict, with the schemes that have it."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if "died" in record and verdict == "fail":
            lines[record["pair"], "", record["died"]] = ["all"]
        for scheme, found in record.get("findings", {}).items():
            for name, finding in found.items():
                if finding["verdict"] == verdict and (name != "patch" or verdict == "fail"):
                    value = "" if finding["value"] is None else f" {finding['value']:.1e}"
                    lines.setdefault((record["pair"], f"{name}{value}", finding["note"]), []).append(scheme)
    return [
        f"- {pair}, {', '.join(schemes)}: {f'{check} {note}'.strip()}" for (pair, check, note), schemes in lines.items()
    ]


def _passes(record: FoundRecord, scheme: str) -> bool:
    found = record.get("findings", {}).get(scheme)
    return bool(found) and all(finding["verdict"] != "fail" for finding in found.values())


if __name__ == "__main__":
    sys.exit(main())
