"""The user's own table, from CSV and Parquet."""

from pathlib import Path

import numpy as np
import pytest

import keel
from keel import KeelError
from keel.data.federated import Pool
from keel.data.table import table

ROWS = [("b", "yes", 1, 0.5), ("a", "no", -2, 1e-3), ("b", "no", 3, 2.25), ("a", "maybe", 4, 0), ("c", "yes", 5, 7)]
HEADER = "hospital,outcome,age,dose"


def write(path: Path, rows: list[tuple[object, ...]] = ROWS, header: str = HEADER) -> str:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def write_parquet(path: Path, rows: list[tuple[object, ...]] = ROWS, header: str = HEADER) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [list(column) for column in zip(*rows, strict=True)]
    parquet.write_table(pyarrow.table(dict(zip(header.split(","), columns, strict=True))), path)
    return str(path)


def load(file: str, **settings: str) -> Pool:
    return table(**{"file": file, "client": "hospital", "label": "outcome", **settings})


def refused(file: str, **settings: str) -> str:
    with pytest.raises(KeelError) as caught:
        load(file, **settings)
    return str(caught.value)


def test_columns_become_keys_labels_and_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "all.csv")
    pool = load(file, test_file=file)
    assert pool.keys is not None
    assert pool.keys.tolist() == ["b", "a", "b", "a", "c"]
    assert pool.train.targets.tolist() == [2, 1, 1, 0, 2]  # maybe, no, yes
    assert pool.classes == 3
    np.testing.assert_array_equal(pool.train.inputs, np.float32([row[2:] for row in ROWS]))


def test_csv_and_parquet_give_the_same(tmp_path: Path) -> None:
    rows = [(number % 11, number % 3, number, 0.1 * number) for number in range(50)]
    for kind, each in ("text", ROWS), ("numbers", rows):
        one = load(write(tmp_path / f"{kind}.csv", each))
        two = load(write_parquet(tmp_path / f"{kind}.parquet", each))
        assert one.classes == two.classes == 3
        for left, right in (one.train, two.train), (one.test, two.test):
            assert left.inputs.equal(right.inputs)
            assert left.targets.equal(right.targets)
        np.testing.assert_array_equal(one.keys, two.keys)
        np.testing.assert_array_equal(one.test_keys, two.test_keys)


def test_a_fifth_is_held_out_where_there_is_no_test_file(tmp_path: Path) -> None:
    rows = [(number % 10, number % 2, number) for number in range(100)]
    file = write(tmp_path / "all.csv", rows, "hospital,outcome,age")
    pool = load(file)
    assert (len(pool.train), len(pool.test)) == (80, 20)
    together = np.concatenate([pool.train.inputs[:, 0], pool.test.inputs[:, 0]])
    assert sorted(together.tolist()) == list(range(100))
    assert pool.test_keys is not None
    assert (pool.test_keys == pool.test.inputs[:, 0].numpy() % 10).all()
    assert load(file).test.inputs.equal(pool.test.inputs)


def test_clients_with_numbers_for_names_are_in_their_order(tmp_path: Path) -> None:
    pool = load(write(tmp_path / "all.csv", [(number, 0, 1.0) for number in range(9, 19)], "hospital,outcome,age"))
    assert pool.keys is not None
    assert pool.keys.dtype == np.int64
    padded = load(write(tmp_path / "all.csv", [(f"{n:03}", 0, 1.0) for n in range(9, 19)], "hospital,outcome,age"))
    assert padded.keys is not None
    assert "009" in {*padded.keys, *(padded.test_keys if padded.test_keys is not None else ())}


def test_a_test_file_has_the_classes_and_columns_of_the_other(tmp_path: Path) -> None:
    file = write(tmp_path / "train.csv")
    test = write(tmp_path / "test.csv", [(0.5, "yes", 30), (1, "no", 40)], "dose,outcome,age")
    pool = load(file, test_file=test)
    assert pool.test.targets.tolist() == [2, 1]
    assert pool.test.inputs.tolist() == [[30, 0.5], [40, 1]]
    assert pool.test_keys is None
    unseen = write(tmp_path / "unseen.csv", [("a", "never", 1, 2)])
    assert "'never' in column 'outcome'" in refused(file, test_file=unseen)
    assert "accepted: the classes of data.file: maybe, no, yes" in refused(file, test_file=unseen)
    other = write(tmp_path / "other.csv", [("a", "yes", 1)], "hospital,outcome,age")
    assert refused(file, test_file=other).startswith("data.test_file: column 'dose' is in ")
    numbers = write(tmp_path / "numbers.csv", [(0, 0, 1, 2)] * 5)
    assert refused(numbers, test_file=file).startswith("data.test_file: 'maybe' in column 'outcome'")


def test_test_rows_stay_with_their_clients_if_all_of_those_train(tmp_path: Path) -> None:
    file = write(tmp_path / "train.csv")
    theirs = load(file, test_file=write(tmp_path / "theirs.csv", [("a", "yes", 1, 2), ("c", "no", 3, 4)]))
    assert theirs.test_keys is not None
    assert theirs.test_keys.tolist() == ["a", "c"]
    others = load(file, test_file=write(tmp_path / "others.csv", [("a", "yes", 1, 2), ("z", "no", 3, 4)]))
    assert others.test_keys is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("hospital,age\na,1\n", "has no column 'outcome'; accepted: its columns hospital, age"),
        ("hospital,outcome\na,1\n", "has only 'hospital' and 'outcome'; accepted: columns of numbers besides"),
        ("hospital,outcome,age\n", "has no rows"),
        ("", "is empty"),
        ("hospital,outcome,age\na,yes,1\nb,no\n", "line 3 has 2 cells; accepted: 3"),
        ("hospital,outcome,age\na,yes,1\nb,no,\n", "line 3: '' in column 'age'; accepted: finite numbers"),
        (
            "hospital,outcome,age\na,yes,old\n",
            "line 2: 'old' in column 'age'; accepted: finite numbers (leave the column",
        ),
        ("hospital,outcome,age\na,yes,nan\n", "line 2: 'nan' in column 'age'"),
        ("hospital,outcome,age\na,yes,1\n\n,no,2\n", "line 4: column 'hospital' is empty"),
        ("hospital,outcome,age,age\na,yes,1,2\n", "columns of one name"),
        ("hospital,outcome,age\na,1.5,1\nb,2.5,2\n", "'1.5' in column 'outcome'"),
        ("hospital,outcome,age\na,-1,1\nb,1,2\n", "'-1' in column 'outcome'"),
        ("hospital,outcome,age\na,0,1\nb,1,2\n", "has 2 rows; accepted: 5 or more, or a data.test_file"),
        ("hospital,outcome,age\n" + "a,0,1e300\n" * 5, "not all values are finite as 32-bit floats"),
        ('hospital,outcome,age\na,"0,1\n', "is not a CSV file in UTF-8"),
    ],
)
def test_what_is_wrong_with_a_csv_is_said_with_its_place(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(content)
    assert said in refused(str(file))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [("a", "yes", 1, "high")],
            "its type: 'string' in column 'dose'; accepted: finite numbers (leave the column out",
        ),
        ([("a", "yes", 1, 0.5), ("a", "yes", None, 0.5)], "row 2: 'None' in column 'age'"),
        ([("a", "yes", 1, float("inf"))], "row 1: 'inf' in column 'dose'"),
        ([("a", "yes", 1, 0.5), (None, "yes", 1, 0.5)], "row 2: column 'hospital' is empty"),
        ([("a", 0.5, 1, 0.5)], "'0.5' in column 'outcome'"),
    ],
)
def test_what_is_wrong_with_a_parquet_is_said_with_its_place(
    rows: list[tuple[object, ...]], said: str, tmp_path: Path
) -> None:
    assert said in refused(write_parquet(tmp_path / "mine.parquet", rows))


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    (tmp_path / "mine.parquet").write_text("no")
    assert "is not a Parquet file" in refused(str(tmp_path / "mine.parquet"))
    assert "accepted: a .csv or a .parquet file" in refused(str(tmp_path / "mine.xlsx"))
    assert "data.file: no file" in refused(str(tmp_path / "none.csv"))
    assert "data.test_file: no file" in refused(write(tmp_path / "mine.csv"), test_file=str(tmp_path / "none.csv"))
    assert "accepted: another column" in refused(str(tmp_path / "mine.csv"), client="outcome")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_parquet(tmp_path / "mine.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert "pip install 'keel-fl[table]'" in refused(file)


def test_a_table_is_trained_on_by_its_name_in_a_spec(tmp_path: Path) -> None:
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
