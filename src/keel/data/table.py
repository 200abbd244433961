"""A user's table from a CSV or Parquet file: one row per example; the spec names the columns."""

import csv
from array import array
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite, nan
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from keel.core.randomness import keyed_rng
from keel.data.arrays import as_dataset, examples
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.errors import KeelError, shown
from keel.settings import PathText

TEST_SHARE = 5
"""Without a test file, 1/5 of the rows are test examples."""
MAX_TEXT = 256
"""The largest number of characters of a client or a label: numpy gives every row as many as the longest has."""

TableTask = Literal["classification", "regression"]


class Columns(NamedTuple):
    """The columns of the client and the label, as text, and the names and values of all other columns."""

    texts: dict[str, np.ndarray]
    names: list[str]
    numbers: np.ndarray


def table(
    *, file: PathText, client: str, label: str, test_file: PathText | None = None, task: TableTask | None = None
) -> Dataset:
    """Your table (CSV or Parquet): one column is the client, one the label, the others are numbers.

    The numbers are the inputs, unscaled. Labels that are text are classes in alphabetical order. Labels with fractions
    are numbers to predict, and so are others if `task` is "regression".
    """
    if client == label:
        raise KeelError(f"data.label must be another column than data.client (got {label!r})")
    train = _read(file, "data.file", (client, label), required=(client, label))
    if not train.names:
        raise KeelError(f"data.file: {file!r} must have columns of numbers (got only {client!r} and {label!r})")
    kind = task or _infer_task(train.texts[label])
    encode = _numbers if kind == "regression" else _encode_labels
    labels, classes = encode(file, "data.file", label, train.texts[label])
    class_names = () if classes is None else tuple(classes.tolist())
    if test_file is None:
        test_rows, train_rows = _split_rows(len(labels), file)
        keys = _as_integers(train.texts[client])
        dataset = as_dataset(
            examples(train.numbers[train_rows], labels[train_rows], "data.", kind),
            examples(train.numbers[test_rows], labels[test_rows], "data.test_", kind),
            keys[train_rows],
            kind,
            class_names,
        )
        return replace(dataset, test_keys=keys[test_rows])
    test = _read(test_file, "data.test_file", (client, label), required=(label,))
    if different := sorted(set(train.names) ^ set(test.names)):
        raise KeelError(
            f"data.test_file: {test_file!r} must have the columns of {file!r}: {shown(different[0])} is in one of "
            "them only"
        )
    numbers = test.numbers[:, [test.names.index(name) for name in train.names]]
    if kind == "regression":
        test_labels = _numbers(test_file, "data.test_file", label, test.texts[label])[0]
    else:
        test_labels = _encode_test_labels(test_file, label, test.texts[label], classes)
    names = [train.texts[client], test.texts.get(client, np.empty(0, dtype=str))]
    keys, test_keys = np.split(_as_integers(np.concatenate(names)), [len(labels)])
    dataset = as_dataset(
        examples(train.numbers, labels, "data.", kind),
        examples(numbers, test_labels, "data.test_", kind),
        keys,
        kind,
        class_names,
    )
    # Without a client column, or with clients that do not train, the test rows belong to no client.
    all_train = len(test_keys) > 0 and bool(np.isin(test_keys, keys).all())
    return replace(dataset, test_keys=test_keys if all_train else None)


ENTRY = CatalogEntry(table, natural=True)


def csv_rows(path: Path, field: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a CSV file, the header first. All rows have equal length."""
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
                        f"{field}: line {reader.line_num} of {str(path)!r} must have {width} cells, "
                        f"as the first line has (got {len(cells)})"
                    )
                yield reader.line_num, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise KeelError(f"{field}: {str(path)!r} is not a CSV file in UTF-8 ({error})") from error


def _read(file: str, field: str, text: tuple[str, ...], required: tuple[str, ...]) -> Columns:
    """Read a table; the columns `text` are text if they exist, those in `required` must exist, the rest are numbers."""
    path = Path(file)
    readers = {".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise KeelError(f"{field} must be a .csv or a .parquet file (got {file!r})")
    if not path.is_file():
        raise KeelError(f"{field}: file {file!r} does not exist")
    columns = readers[path.suffix.lower()](path, field, text, required)
    if not all(map(len, columns.texts.values())):
        raise KeelError(f"{field}: {file!r} has no rows; one row per example is required")
    return columns


def _check_names(path: Path, field: str, names: list[str], required: tuple[str, ...]) -> None:
    for name in required:
        if name not in names:
            columns = ", ".join(names[:20]) + ", ..." * (len(names) > 20)
            raise KeelError(f"{field}: {str(path)!r} has no column {name!r}; its columns are {columns[:1000]}")
    if len(set(names)) < len(names) or "" in names:
        raise KeelError(
            f"{field}: {str(path)!r} must have a different name for each column (got a name twice or an empty one)"
        )


def _read_csv(path: Path, field: str, text: tuple[str, ...], required: tuple[str, ...]) -> Columns:
    rows = csv_rows(path, field)
    _, header = next(rows, (1, []))
    if not header:
        raise KeelError(
            f"{field}: {str(path)!r} is empty; a header with the column names and one row per example are required"
        )
    _check_names(path, field, header, required)
    inputs = [i for i, name in enumerate(header) if name not in text]
    texts: list[tuple[int, list[str]]] = [(i, []) for i, name in enumerate(header) if name in text]
    values = array("d")
    for line, cells in rows:
        for i, column in texts:
            _check_text(path, field, header[i], f"line {line}", cells[i])
            column.append(cells[i])
        row = [_number(cells[i]) for i in inputs]
        if not all(map(isfinite, row)):
            wrong = next(i for i, value in zip(inputs, row, strict=True) if not isfinite(value))
            raise _not_a_number(path, field, header[wrong], f"line {line}", cells[wrong])
        values.extend(row)
    numbers = np.array(values).reshape(-1, len(inputs) or 1)
    return Columns(
        {header[i]: np.array(column, dtype=str) for i, column in texts},
        [header[i] for i in inputs],
        _narrow(numbers),
    )


def _read_parquet(path: Path, field: str, text: tuple[str, ...], required: tuple[str, ...]) -> Columns:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise KeelError(
            f"{field}: Parquet requires pyarrow: pip install 'keel-fl[table]', or use a .csv file"
        ) from None
    try:
        with ParquetFile(path) as file:
            content = file.read()
        columns = content.column_names
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise KeelError(f"{field}: {str(path)!r} is not a Parquet file ({shown(str(error))})") from error
    _check_names(path, field, columns, required)
    names = [name for name in content.column_names if name not in text]
    numbers = np.empty((content.num_rows, len(names)), np.float32)
    texts: dict[str, np.ndarray] = {}
    for name, column in zip(content.column_names, content.columns, strict=True):
        if name in text:
            try:
                values = ["" if value is None else str(value) for value in column.to_pylist()]
            except UnicodeDecodeError as error:
                raise KeelError(f"{field}: {str(path)!r} has a column {name!r} that is not UTF-8 ({error})") from error
            for row, value in enumerate(values, 1):
                _check_text(path, field, name, f"row {row}", value)
            texts[name] = np.array(values, dtype=str)
        else:
            try:
                floats = column.cast(pyarrow.float64(), safe=False).to_numpy()
            except pyarrow.ArrowException:
                raise _not_a_number(path, field, name, "the type", column.type) from None
            if len(wrong := np.flatnonzero(~np.isfinite(floats))):
                raise _not_a_number(path, field, name, f"row {wrong[0] + 1}", column[int(wrong[0])])
            numbers[:, names.index(name)] = _narrow(floats)
    return Columns(texts, names, numbers)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return nan


def _narrow(values: np.ndarray) -> np.ndarray:
    """Convert to 32-bit floats; a value that is too large becomes infinite, which `examples` refuses."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _as_integers(texts: np.ndarray) -> np.ndarray:
    """Convert texts to integers if all are, so that 10 is sorted after 9; "007" is text."""
    try:
        numbers = texts.astype(np.int64)
    except (ValueError, OverflowError):
        return texts
    return numbers if np.array_equal(numbers.astype(str), texts) else texts


def _infer_task(texts: np.ndarray) -> TableTask:
    """Return "regression" for numbers of which some have fractions."""
    if _as_integers(texts).dtype.kind == "i":
        return "classification"
    numbers = [_number(text) for text in np.unique(texts)]
    fractions = all(map(isfinite, numbers)) and any(number != int(number) for number in numbers)
    return "regression" if fractions else "classification"


def _numbers(file: str, field: str, label: str, texts: np.ndarray) -> tuple[np.ndarray, None]:
    """Convert the labels of a regression to numbers."""
    numbers = np.array([_number(text) for text in texts])
    if len(wrong := np.flatnonzero(~np.isfinite(numbers))):
        raise _not_a_number(Path(file), field, label, f"row {wrong[0] + 1}", texts[wrong[0]])
    return numbers, None


def _encode_labels(file: str, field: str, label: str, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Convert labels to numbers.

    Returns:
        Whole numbers and None; or, for labels that are text, their positions among the sorted classes and the classes.
    """
    labels = _as_integers(texts)
    classes, positions = np.unique(labels, return_inverse=True)
    integers = labels.dtype.kind == "i"
    if classes[0] < 0 if integers else all(isfinite(_number(name)) for name in classes):
        raise KeelError(
            f"{field}: labels in column {label!r} of {file!r} must be whole numbers from 0, or text "
            f"(got {shown(str(classes[0]))})"
        )
    return (labels, None) if integers else (positions, classes)


def _encode_test_labels(file: str, label: str, texts: np.ndarray, classes: np.ndarray | None) -> np.ndarray:
    """Convert the labels of the test file to the numbers that they have in the training file."""
    if classes is None:
        labels, test_classes = _encode_labels(file, "data.test_file", label, texts)
        unknown = [] if test_classes is None else test_classes.tolist()
        expected = "whole numbers, as in data.file"
    else:
        labels = np.searchsorted(classes, texts)
        unknown = sorted(set(texts.tolist()) - set(classes.tolist()))
        expected = f"classes of data.file: {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
    if unknown:
        raise KeelError(
            f"data.test_file: labels in column {label!r} of {file!r} must be {expected} (got {shown(unknown[0])})"
        )
    return labels


def _split_rows(rows: int, file: str) -> tuple[np.ndarray, np.ndarray]:
    """Draw the test rows and the training rows, the same in every run."""
    if rows < TEST_SHARE:
        raise KeelError(f"data.file: {file!r} must have at least {TEST_SHARE} rows (got {rows}), or set data.test_file")
    test_rows, train_rows = np.split(keyed_rng(0, "table test").permutation(rows), [rows // TEST_SHARE])
    return np.sort(test_rows), np.sort(train_rows)


def _check_text(path: Path, field: str, column: str, where: str, cell: str) -> None:
    """Raise a KeelError if the cell of a client or a label is empty or too long."""
    if not cell:
        raise KeelError(
            f"{field}: column {column!r} must have a value in every row ({where} of {str(path)!r} is empty)"
        )
    if len(cell) > MAX_TEXT:
        raise KeelError(
            f"{field}: column {column!r} must have at most {MAX_TEXT} characters per row "
            f"({where} of {str(path)!r} has {len(cell)})"
        )


def _not_a_number(path: Path, field: str, column: str, where: str, value: object) -> KeelError:
    return KeelError(
        f"{field}: column {shown(column)} must have finite numbers ({where} of {str(path)!r} is "
        f"{shown(str(value))}); encode it as numbers or remove it"
    )
