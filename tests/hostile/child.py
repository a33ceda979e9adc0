"""`main()` with `FOLDER KIND ...` in `sys.argv` reads damaged files under limits, and says what happened.

A separate process, so that the limits apply to nothing else, and a crash is a result.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from tests.hostile.checkpoint_kinds import ConfigBytes, ConfigEntry, WeightsHeader, WeightsIndex
from tests.hostile.kinds import MULTIPLE, FileKind, Input, damaged
from tests.hostile.settings_kinds import MinimalPairs, Study

#: All kinds of files that are damaged.
KINDS: dict[str, type[FileKind]] = {
    "config": ConfigEntry,
    "config-bytes": ConfigBytes,
    "weights": WeightsHeader,
    "index": WeightsIndex,
    "study": Study,
    "minimal-pairs": MinimalPairs,
}
#: Seconds of processor time for one file.
SECONDS = 10
#: Bytes of address space beyond what the sound files take.
ADDRESS_SPACE = 2**31


class TooLong(BaseException):
    """A file took more than `SECONDS`."""


def _stop(*_: Any) -> None:
    raise TooLong


def _status(field: str) -> int:
    """A size of this process from /proc, in KB; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field + ":")), 0)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    folder = Path(sys.argv[1])
    prepared = {}
    for name in sys.argv[2:]:
        prepared[name] = KINDS[name]()
        (folder / name).mkdir()
        prepared[name].prepare(folder / name)
    signal.signal(signal.SIGPROF, _stop)
    size = _status("VmSize")
    if size:
        limit = size * 1024 + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name, kind in prepared.items():
        fixed = kind.fixed()
        for number in range(len(fixed) + kind.inputs * MULTIPLE):
            path, given = fixed[number] if number < len(fixed) else kind.draw(Random(f"{name} {number - len(fixed)}"))
            print(
                "RESULT", json.dumps({"kind": name, "number": number, **_read(kind, path, given, number)}), flush=True
            )


def _read(kind: FileKind, path: Path, given: Input, number: int) -> dict[str, Any]:
    result: dict[str, Any] = {"what": given.what, "neutral": given.neutral}
    result["words"] = [str(path.parent), path.name, *given.words]
    before, start = _reset_peak(), _seconds()
    with damaged(path, given):
        result["ours"] = kind.ours(path)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            result["read"] = kind.read(path, number)
        except BaseException as error:
            result["error"] = [cls.__name__ for cls in type(error).__mro__]
            result["message"] = str(error)
            result["trace"] = "".join(traceback.format_exception(error)[-8:])[-3000:]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    result["seconds"] = _seconds() - start
    result["megabytes"] = (_status("VmHWM") - before) / 1024
    return result


def _seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _reset_peak() -> int:
    """Resets the peak of the resident size, where the system can; returns that size."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _status("VmHWM")
    return _status("VmRSS")
