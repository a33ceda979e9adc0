"""A process that trains as often as it is asked to: reads command lines as JSON, and writes status and messages.

`python -m tests.training.run_one_by_one`; ends with its standard input.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from training import run_clm

if __name__ == "__main__":
    answers = sys.stdout
    for line in sys.stdin:
        said = io.StringIO()
        # What else is printed must not come between the answers.
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            status = run_clm.main(json.loads(line))
        print(json.dumps([status, said.getvalue()]), file=answers, flush=True)
