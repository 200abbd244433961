"""A user's table from CSV and Parquet."""

from pathlib import Path

import numpy as np
import pytest

import keel
from keel import Dataset, KeelError
from keel.data.table import table

ROWS = [("b", "yes", 1, 0.5), ("a", "no", -2, 1e-3), ("b", "no", 3, 2.25), ("a", "maybe", 4, 0), ("c", "yes", 5, 7)]
HEADER = "hospital,outcome,age,dose"


def write(path: Path, rows: list[tuple[object, ...]] = ROWS, header: str = HEADER) -> str:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def write_parquet(path: Path, rows: list[tuple[object, ...]] = ROWS, header: str = HEADER) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet requires pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [list(column) for column in zip(*rows, strict=True)]
    parquet.write_table(pyarrow.table(dict(zip(header.split(","), columns, strict=True))), path)
    return str(path)


def load(file: str, **settings: str) -> Dataset:
    return table(**{"file": file, "client": "hospital", "label": "outcome", **settings})


def error_of(file: str, **settings: str) -> str:
    with pytest.raises(KeelError) as caught:
        load(file, **settings)
    return str(caught.value)


def test_columns_become_keys_labels_and_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "all.csv")
    dataset = load(file, test_file=file)
    assert dataset.keys is not None
    assert dataset.keys.tolist() == ["b", "a", "b", "a", "c"]
    assert dataset.train.targets.tolist() == [2, 1, 1, 0, 2]  # maybe, no, yes
    assert dataset.classes == 3
    assert dataset.class_names == load(file).class_names == ("maybe", "no", "yes")
    np.testing.assert_array_equal(dataset.train.inputs, np.float32([row[2:] for row in ROWS]))


def test_csv_and_parquet_give_the_same_data(tmp_path: Path) -> None:
    rows = [(number % 11, number % 3, number, 0.1 * number) for number in range(50)]
    for kind, content in ("text", ROWS), ("numbers", rows):
        one = load(write(tmp_path / f"{kind}.csv", content))
        two = load(write_parquet(tmp_path / f"{kind}.parquet", content))
        assert one.classes == two.classes == 3
        for left, right in (one.train, two.train), (one.test, two.test):
            assert left.inputs.equal(right.inputs)
            assert left.targets.equal(right.targets)
        np.testing.assert_array_equal(one.keys, two.keys)
        np.testing.assert_array_equal(one.test_keys, two.test_keys)


def test_a_fifth_of_the_rows_is_held_out_without_a_test_file(tmp_path: Path) -> None:
    rows = [(number % 10, number % 2, number) for number in range(100)]
    file = write(tmp_path / "all.csv", rows, "hospital,outcome,age")
    dataset = load(file)
    assert (len(dataset.train), len(dataset.test)) == (80, 20)
    together = np.concatenate([dataset.train.inputs[:, 0], dataset.test.inputs[:, 0]])
    assert sorted(together.tolist()) == list(range(100))
    assert dataset.test_keys is not None
    assert (dataset.test_keys == dataset.test.inputs[:, 0].numpy() % 10).all()
    assert load(file).test.inputs.equal(dataset.test.inputs)


def test_numeric_client_names_are_sorted_as_numbers(tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "all.csv", [(number, 0, 1.0) for number in range(9, 19)], "hospital,outcome,age"))
    assert dataset.keys is not None
    assert dataset.keys.dtype == np.int64
    padded = load(write(tmp_path / "all.csv", [(f"{n:03}", 0, 1.0) for n in range(9, 19)], "hospital,outcome,age"))
    assert padded.keys is not None
    assert "009" in {*padded.keys, *(padded.test_keys if padded.test_keys is not None else ())}


def test_a_test_file_must_have_the_classes_and_columns_of_the_training_file(tmp_path: Path) -> None:
    file = write(tmp_path / "train.csv")
    test = write(tmp_path / "test.csv", [(0.5, "yes", 30), (1, "no", 40)], "dose,outcome,age")
    dataset = load(file, test_file=test)
    assert dataset.test.targets.tolist() == [2, 1]
    assert dataset.test.inputs.tolist() == [[30, 0.5], [40, 1]]
    assert dataset.test_keys is None
    unseen = write(tmp_path / "unseen.csv", [("a", "never", 1, 2)])
    assert "(got 'never')" in error_of(file, test_file=unseen)
    assert "must be classes of data.file: maybe, no, yes" in error_of(file, test_file=unseen)
    other = write(tmp_path / "other.csv", [("a", "yes", 1)], "hospital,outcome,age")
    assert error_of(file, test_file=other).endswith("'dose' is in one of them only")
    numbers = write(tmp_path / "numbers.csv", [(0, 0, 1, 2)] * 5)
    assert error_of(numbers, test_file=file).endswith("must be whole numbers, as in data.file (got 'maybe')")


def test_test_rows_keep_their_clients_if_all_of_them_train(tmp_path: Path) -> None:
    file = write(tmp_path / "train.csv")
    training_clients = load(
        file, test_file=write(tmp_path / "training_clients.csv", [("a", "yes", 1, 2), ("c", "no", 3, 4)])
    )
    assert training_clients.test_keys is not None
    assert training_clients.test_keys.tolist() == ["a", "c"]
    others = load(file, test_file=write(tmp_path / "others.csv", [("a", "yes", 1, 2), ("z", "no", 3, 4)]))
    assert others.test_keys is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hospital,age\na,1\n", "has no column 'outcome'; its columns are hospital, age"),
        ("hospital,outcome\na,1\n", "must have columns of numbers (got only 'hospital' and 'outcome')"),
        ("hospital,outcome,age\n", "has no rows"),
        ("", "is empty"),
        ("hospital,outcome,age\na,yes,1\nb,no\n", "table.csv' must have 3 cells, as the first line has (got 2)"),
        ("hospital,outcome,age\na,yes,1\nb,no,\n", "column 'age' must have finite numbers (line 3 of "),
        (
            "hospital,outcome,age\na,yes,old\n",
            "is 'old'); encode it as numbers or remove it",
        ),
        ("hospital,outcome,age\na,yes,nan\n", "table.csv' is 'nan')"),
        ("hospital,outcome,age\na,yes,1\n\n,no,2\n", "column 'hospital' must have a value in every row (line 4 of"),
        ("hospital,outcome,age,age\na,yes,1,2\n", "must have a different name for each column"),
        ("hospital,outcome,age\na,1.0,1\nb,2.0,2\n", "must be whole numbers from 0, or text (got '1.0')"),
        ("hospital,outcome,age\na,-1,1\nb,1,2\n", "must be whole numbers from 0, or text (got '-1')"),
        ("hospital,outcome,age\na,0,1\nb,1,2\n", "must have at least 5 rows (got 2), or set data.test_file"),
        ("hospital,outcome,age\n" + "a,0,1e300\n" * 5, "data.inputs must be finite as 32-bit floats"),
        ('hospital,outcome,age\na,"0,1\n', "is not a CSV file in UTF-8"),
    ],
)
def test_an_invalid_csv_is_refused_with_line_and_column(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text(content)
    assert message in error_of(str(file))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [("a", "yes", 1, "high")],
            "column 'dose' must have finite numbers (the type of",
        ),
        ([("a", "yes", 1, 0.5), ("a", "yes", None, 0.5)], "column 'age' must have finite numbers (row 2 of"),
        ([("a", "yes", 1, float("inf"))], "table.parquet' is 'inf')"),
        ([("a", "yes", 1, 0.5), (None, "yes", 1, 0.5)], "column 'hospital' must have a value in every row (row 2 of"),
    ],
)
def test_an_invalid_parquet_file_is_refused_with_row_and_column(
    rows: list[tuple[object, ...]], message: str, tmp_path: Path
) -> None:
    assert message in error_of(write_parquet(tmp_path / "table.parquet", rows))


def test_files_that_are_not_tables_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet requires pyarrow")
    (tmp_path / "table.parquet").write_text("no")
    assert "is not a Parquet file" in error_of(str(tmp_path / "table.parquet"))
    assert "data.file must be a .csv or a .parquet file" in error_of(str(tmp_path / "table.xlsx"))
    assert "data.file: file" in error_of(str(tmp_path / "none.csv"))
    assert "data.test_file: file" in error_of(write(tmp_path / "table.csv"), test_file=str(tmp_path / "none.csv"))
    assert "data.label must be another column than data.client" in error_of(
        str(tmp_path / "table.csv"), client="outcome"
    )


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_parquet(tmp_path / "table.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert "pip install 'keel-fl[table]'" in error_of(file)


def test_a_spec_can_train_on_a_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [(f"h{n % 4}", n % 2, n % 2 + rng.normal() / 10, rng.normal()) for n in range(200)]
    settings = {"file": write(tmp_path / "all.csv", rows), "client": "hospital", "label": "outcome"}
    run = keel.run(
        {
            "rounds": 20,
            "algorithm": {"name": "fedavg"},
            "data": {"name": "table", "partition": "key", **settings},
            "model": {"name": "linear"},
            "local": {"lr": 1.0},
            "participation": {"rate": 1.0},
        },
        out=tmp_path / "run",
    )
    assert run.accuracy is not None
    assert run.accuracy > 0.9


def test_labels_with_fractions_are_numbers_to_predict(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("hospital,stay,age\n" + "".join(f"{row % 3},{row / 2},{row}\n" for row in range(20)))
    data = table(file=str(path), client="hospital", label="stay")
    assert (data.task, data.classes) == ("regression", 0)
    both = sorted([*data.train.targets.tolist(), *data.test.targets.tolist()])
    assert both == [row / 2 for row in range(20)]
    path.write_text("hospital,stay,age\n" + "".join(f"{row % 3},{row},{row}\n" for row in range(20)))
    assert table(file=str(path), client="hospital", label="stay").task == "classification"
    assert table(file=str(path), client="hospital", label="stay", task="regression").task == "regression"
