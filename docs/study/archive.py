"""The training runs of a study in one Parquet file: to read with pandas, and to go on with a study elsewhere.

    python docs/study/archive.py pack outputs/compare runs.parquet
    python docs/study/archive.py unpack runs.parquet outputs/compare

`pandas.read_parquet` gives one row per training that has ended. Figures are columns of lists and named values, as in
`results.json`; what differs from scheme to scheme (`config`, `training`, `settings`, ...) is JSON text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyarrow
from pyarrow import parquet

from hf_posenc.errors import close_names
from training.errors import SettingsError
from training.files import read_json, write_json
from training.study.folder import taken as in_use

#: Named values whose names differ from scheme to scheme, which a column cannot have.
_TEXTS = ("config", "training", "swap_options", "swap")
#: Columns that are not part of a result: the name of the training, and what it began with.
_NAME, _SETTINGS, _RATE = "name", "settings", "learning_rate"
#: Where the file keeps what all training runs share.
_STUDY = b"study"


class Training(NamedTuple):
    """A training that has ended: its name, what it began with, and its result."""

    name: str
    settings: dict[str, Any]
    result: dict[str, Any]


def pack(folder: Path, file: Path) -> int:
    """Writes all training runs of a study that have ended, also those of a study that was stopped.

    Args:
        folder: the output folder of the study. What its `results.json` says of the whole is kept, if there is one.
        file: is replaced.

    Returns:
        How many training runs there are.

    Raises:
        SettingsError: if no training has ended.
    """
    rows = []
    for path in sorted((folder / "trainings").glob("*/result.json")):
        result, settings = read_json(path), read_json(path.with_name("settings.json"))
        texts = {name: json.dumps(result[name]) for name in _TEXTS if name in result}
        rate = {_RATE: settings["learning_rate"], _SETTINGS: json.dumps(settings)}
        rows.append({_NAME: path.parent.name, **_without_empty(result), **texts, **rate})
    if not rows:
        raise SettingsError(f"{folder} has no training that has ended; name the output folder of a study.")
    # The columns of all rows: pyarrow takes those of the first one.
    columns = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    study = read_json(folder / "results.json")
    if study is not None:
        del study["runs"]
        table = table.replace_schema_metadata({_STUDY: json.dumps(study)})
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, file, compression="zstd", compression_level=19)
    return len(rows)


def trainings(file: Path) -> list[Training]:
    """The trainings in a file that `pack` wrote.

    Raises:
        SettingsError: if it did not.
    """
    packed = []
    for row in _table(file).to_pylist():
        texts = {name: json.loads(row[name]) for name in _TEXTS if row.get(name) is not None}
        result = {name: value for name, value in row.items() if name not in (_NAME, _SETTINGS, _RATE)}
        packed.append(Training(row[_NAME], json.loads(row[_SETTINGS]), _without_empty(result) | texts))
    return packed


def study_in(file: Path) -> dict[str, Any]:
    """What the `results.json` of the packed study said of the whole study: its tasks, settings and versions.

    Raises:
        SettingsError: for a study that was stopped before it wrote that file, or a file that `pack` did not write.
    """
    metadata = _table(file).schema.metadata or {}
    if _STUDY not in metadata:
        raise SettingsError(f"{file} was packed before the study had written its results.json.")
    study: dict[str, Any] = json.loads(metadata[_STUDY])
    return study


def unpack(file: Path, folder: Path) -> int:
    """Writes the training runs of a file into the output folder of a study, which goes on from there.

    Args:
        file: what `pack` wrote.
        folder: an output folder; may have training runs already.

    Returns:
        How many training runs were written.

    Raises:
        SettingsError: for a file that `pack` did not write, a folder of something else, or a training that the folder
            has already.
    """
    packed = trainings(file)
    places = {training.name: folder / "trainings" / training.name for training in packed}
    taken = [name for name, place in places.items() if (place / "settings.json").exists()]
    if taken:
        raise SettingsError(f"{folder} has {taken[0]} already. Name a folder without it, or remove {folder}.")
    with in_use(folder, writes=True):
        for name, settings, result in packed:
            write_json(places[name] / "settings.json", settings)
            write_json(places[name] / "result.json", result)
    return len(packed)


def _table(file: Path) -> pyarrow.Table:
    if not file.is_file():
        close = close_names(file.name, [path.name for path in file.parent.glob("*.parquet")])
        raise SettingsError(f"There is no file {file}.{f' Did you mean {close[0]}?' if close else ''}")
    try:
        table = parquet.read_table(file)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from error
    missing = sorted({_NAME, _SETTINGS, _RATE} - set(table.column_names))
    if missing:
        raise SettingsError(f"{file} holds no training runs of a study: it has no column {missing[0]!r}.")
    return table


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Named values without those that are `None`, at any depth: a column has them for every row."""
    return {
        name: _without_empty(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None and value != {}
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("direction", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path, help="what is read: the study's output folder, or the Parquet file")
    parser.add_argument("target", type=Path, help="what is written: the Parquet file, or the output folder")
    options = parser.parse_args(arguments)
    try:
        count = {"pack": pack, "unpack": unpack}[options.direction](options.source, options.target)
    except SettingsError as error:
        print(f"archive: {error}", file=sys.stderr)
        return 2
    print(f"Written to {options.target}: {count} training runs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
