"""The user's own table, from a CSV or Parquet file: a row for each example, its columns named in the spec."""

import csv
from array import array
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keel.data.arrays import examples, pool
from keel.data.federated import Pool
from keel.errors import KeelError
from keel.randomness import draws
from keel.settings import PathText

TEST_SHARE = 5
"""One row in so many is for the test, where there is no file for it."""


class Columns(NamedTuple):
    """The columns that name the client and the label as text, and all the others as one array of numbers."""

    texts: dict[str, np.ndarray]
    names: list[str]
    numbers: np.ndarray


def table(*, file: PathText, client: str, label: str, test_file: PathText | None = None) -> Pool:
    """The user's own table (CSV or Parquet): a column names the client, one the label, the others are numbers.

    The numbers are the inputs as they are; scale them before. Text labels are classes in alphabetical order.
    """
    if client == label:
        raise KeelError(f"data.label: {label!r} is data.client already; accepted: another column")
    train = _read(file, "data.file", (client, label), needed=(client, label))
    if not train.names:
        raise KeelError(f"data.file: {file!r} has only {client!r} and {label!r}; accepted: columns of numbers besides")
    labels, classes = _coded(file, "data.file", label, train.texts[label])
    if test_file is None:
        held, kept = _drawn(len(labels), file)
        keys = _whole(train.texts[client])
        held_out = examples(train.numbers[held], labels[held], "data.test_")
        whole = pool(examples(train.numbers[kept], labels[kept], "data."), held_out, keys[kept])
        return replace(whole, test_keys=keys[held])
    test = _read(test_file, "data.test_file", (client, label), needed=(label,))
    if odd := sorted(set(train.names) ^ set(test.names)):
        raise KeelError(
            f"data.test_file: column {odd[0]!r} is in {file!r} or {test_file!r} alone; accepted: the same columns"
        )
    numbers = test.numbers[:, [test.names.index(name) for name in train.names]]
    held_out = examples(numbers, _coded_alike(test_file, label, test.texts[label], classes), "data.test_")
    names = [train.texts[client], test.texts.get(client, np.empty(0, dtype=str))]
    keys, test_keys = np.split(_whole(np.concatenate(names)), [len(labels)])
    whole = pool(examples(train.numbers, labels, "data."), held_out, keys)
    # Of clients who train not, as when the column is not there, all test rows are for everybody.
    theirs = len(test_keys) > 0 and bool(np.isin(test_keys, keys).all())
    return replace(whole, test_keys=test_keys if theirs else None)


def csv_rows(path: Path, field: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each row of a CSV file, the names of its columns first; all are equally long."""
    width = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                if not cells:  # a blank line
                    continue
                width = width or len(cells)
                if len(cells) != width:
                    raise KeelError(
                        f"{field}: {str(path)!r} line {reader.line_num} has {len(cells)} cells; "
                        f"accepted: {width}, as the first line has"
                    )
                yield reader.line_num, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise KeelError(f"{field}: {str(path)!r} is not a CSV file in UTF-8 ({error})") from error


def _read(file: str, field: str, text: tuple[str, ...], needed: tuple[str, ...]) -> Columns:
    path = Path(file)
    readers = {".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise KeelError(f"{field}: {file!r}; accepted: a .csv or a .parquet file")
    if not path.is_file():
        raise KeelError(f"{field}: no file {file!r}")
    columns = readers[path.suffix.lower()](path, field, text, needed)
    if not all(map(len, columns.texts.values())):
        raise KeelError(f"{field}: {file!r} has no rows; accepted: a row for each example")
    return columns


def _check_names(path: Path, field: str, names: list[str], needed: tuple[str, ...]) -> None:
    for name in needed:
        if name not in names:
            raise KeelError(f"{field}: {str(path)!r} has no column {name!r}; accepted: its columns {', '.join(names)}")
    if len(set(names)) < len(names) or "" in names:
        raise KeelError(f"{field}: {str(path)!r} has columns of one name, or of none; accepted: a name for each")


def _read_csv(path: Path, field: str, text: tuple[str, ...], needed: tuple[str, ...]) -> Columns:
    rows = csv_rows(path, field)
    _, header = next(rows, (1, []))
    if not header:
        raise KeelError(f"{field}: {str(path)!r} is empty; accepted: the names of the columns, then a row per example")
    _check_names(path, field, header, needed)
    places = [place for place, name in enumerate(header) if name not in text]
    texts: list[tuple[int, list[str]]] = [(place, []) for place, name in enumerate(header) if name in text]
    values = array("d")
    for line, cells in rows:
        for place, column in texts:
            if not cells[place]:
                raise _empty(path, field, header[place], f"line {line}")
            column.append(cells[place])
        row = [_number(cells[place]) for place in places]
        if not all(map(isfinite, row)):
            bad = next(place for place, value in zip(places, row, strict=True) if not isfinite(value))
            raise _no_number(path, field, header[bad], f"line {line}", cells[bad])
        values.extend(row)
    numbers = np.array(values).reshape(-1, len(places) or 1)
    return Columns(
        {header[place]: np.array(column, dtype=str) for place, column in texts},
        [header[place] for place in places],
        _narrow(numbers),
    )


def _read_parquet(path: Path, field: str, text: tuple[str, ...], needed: tuple[str, ...]) -> Columns:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise KeelError(f"{field}: Parquet needs pyarrow; accepted: pip install 'keel-fl[table]', or a .csv") from None
    try:
        with ParquetFile(path) as file:
            content = file.read()
    except (OSError, pyarrow.ArrowException) as error:
        raise KeelError(f"{field}: {str(path)!r} is not a Parquet file ({error})") from error
    _check_names(path, field, content.column_names, needed)
    names = [name for name in content.column_names if name not in text]
    numbers = np.empty((content.num_rows, len(names)), np.float32)
    texts: dict[str, np.ndarray] = {}
    for name, column in zip(content.column_names, content.columns, strict=True):
        if name in text:
            values = column.to_pylist()
            for row, value in enumerate(values, 1):
                if value is None or value == "":
                    raise _empty(path, field, name, f"row {row}")
            texts[name] = np.array([str(value) for value in values], dtype=str)
        else:
            try:
                floats = column.cast(pyarrow.float64(), safe=False).to_numpy()
            except pyarrow.ArrowException:
                raise _no_number(path, field, name, "its type", column.type) from None
            if len(bad := np.flatnonzero(~np.isfinite(floats))):
                raise _no_number(path, field, name, f"row {bad[0] + 1}", column[int(bad[0])])
            numbers[:, names.index(name)] = _narrow(floats)
    return Columns(texts, names, numbers)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return nan


def _narrow(values: np.ndarray) -> np.ndarray:
    """As 32-bit floats; what is too large becomes infinite, and is refused with the other inputs."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _whole(texts: np.ndarray) -> np.ndarray:
    """Texts that are all whole numbers as such, so that 10 comes after 9; other texts as they are (007 is one)."""
    try:
        numbers = texts.astype(np.int64)
    except (ValueError, OverflowError):
        return texts
    return numbers if np.array_equal(numbers.astype(str), texts) else texts


def _coded(file: str, field: str, label: str, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Labels as numbers: the whole numbers they are, or their places among the classes, which come with them."""
    labels = _whole(texts)
    classes, places = np.unique(labels, return_inverse=True)
    whole = labels.dtype.kind == "i"
    if classes[0] < 0 if whole else all(isfinite(_number(name)) for name in classes):
        raise KeelError(
            f"{field}: {str(classes[0])!r} in column {label!r} of {file!r}; "
            "accepted: labels that are whole numbers from 0, or text"
        )
    return (labels, None) if whole else (places, classes)


def _coded_alike(file: str, label: str, texts: np.ndarray, classes: np.ndarray | None) -> np.ndarray:
    """The test file's labels, in the code of the training file's."""
    if classes is None:
        labels, own = _coded(file, "data.test_file", label, texts)
        unknown = [] if own is None else own.tolist()
        accepted = "whole numbers, as in data.file"
    else:
        labels = np.searchsorted(classes, texts)
        unknown = sorted(set(texts.tolist()) - set(classes.tolist()))
        accepted = f"the classes of data.file: {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
    if unknown:
        raise KeelError(f"data.test_file: {unknown[0]!r} in column {label!r} of {file!r}; accepted: {accepted}")
    return labels


def _drawn(rows: int, file: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows for the test and those to train on, the same in every run."""
    if rows < TEST_SHARE:
        raise KeelError(f"data.file: {file!r} has {rows} rows; accepted: {TEST_SHARE} or more, or a data.test_file")
    held, kept = np.split(draws(0, "table test").permutation(rows), [rows // TEST_SHARE])
    return np.sort(held), np.sort(kept)


def _empty(path: Path, field: str, column: str, where: str) -> KeelError:
    return KeelError(f"{field}: {str(path)!r} {where}: column {column!r} is empty; accepted: a value in every row")


def _no_number(path: Path, field: str, column: str, where: str, value: object) -> KeelError:
    return KeelError(
        f"{field}: {str(path)!r} {where}: {str(value)!r} in column {column!r}; accepted: finite numbers "
        "(leave the column out, or code it as numbers)"
    )
