"""lm-evaluation-harness on patched models: `python -m hf_posenc.integrations.lm_eval --model hf --tasks ...`.

lm-eval has no option that imports a package, and loads its models with `from_pretrained`. Importing this package is all
that a patched checkpoint needs, so this module imports it and hands every argument to lm-eval's own command, unread.
Without it, lm-eval stops at a patched checkpoint: the Auto classes do not know the model type `hf_posenc`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from hf_posenc.errors import UnsupportedError


def is_installed() -> bool:
    """Whether lm-eval can be imported."""
    return importlib.util.find_spec("lm_eval") is not None


def run(arguments: Sequence[str]) -> None:
    """Runs lm-eval's command in this process.

    Args:
        arguments: the words after `lm-eval`.

    Raises:
        UnsupportedError: if lm-eval is not installed.
        SystemExit: as lm-eval's command ends.
    """
    if not is_installed():
        raise UnsupportedError("lm-eval is not installed. Run: pip install 'lm-eval>=0.4.13'")
    from lm_eval.__main__ import cli_evaluate

    # lm-eval reads the words of the process, and nothing else.
    found = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = found


if __name__ == "__main__":
    run(sys.argv[1:])
