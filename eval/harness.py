"""lm-evaluation-harness on patched models: `accelerate launch eval/harness.py --model hf --model_args ... --tasks ...`.

The same as `hf-posenc lm-eval`. All options are lm-eval's, except `--import MODULE` before them. On GPUs, lm-eval
distributes its work over the processes. On a CPU, each process would do all of it, so only the first one runs.
"""

import sys

import launched_script  # noqa: F401  (finds the repository)

from hf_posenc.cli import main
from training.machine import is_first_process, launched_on_cpu


def command(words: list[str]) -> list[str]:
    """Puts the verb after `--import MODULE`, which is not an option of lm-eval."""
    options = 0
    while words[options : options + 1] == ["--import"]:
        options += 2
    return [*words[:options], "lm-eval", *words[options:]]


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:])) if is_first_process() or not launched_on_cpu() else 0)
