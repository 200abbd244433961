"""Values that no spec can have are refused before anything computes with them or prints them."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from keel import KeelError, make_spec
from keel.config.overrides import override, read_spec
from keel.config.schema import EvaluationSpec
from keel.config.values import check_values


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


REFUSED: list[tuple[dict[Any, Any], str]] = [
    (
        {"seed": 10**400},
        "seed must be an integer from -9223372036854775807 to 9223372036854775807 (got one of 1329 bits)",
    ),
    ({"local": {"lr": 10**5000}}, "local.lr must be an integer from "),
    ({"local": {"lr": 1e300}}, "local.lr must be 0 or from 1.2e-38 to 3.4e+38, the range of float32 (got 1e+300)"),
    ({"local": {"lr": 1e-300}}, "local.lr must be 0 or from 1.2e-38 to 3.4e+38, the range of float32 (got 1e-300)"),
    ({"model": {"hidden": nested(5000)}}, "model.hidden is nested too deeply; use at most 16 tables and lists"),
    (
        {"rounds": date(2026, 1, 1)},
        "rounds must be a number, text, true or false, a list or a table (got datetime.date(",
    ),
    ({"data": {"name": "builtins:dict", "x": len}}, "data.x must be a number, text, true or false, a list or a table"),
    (
        {"evaluation": {"metrics": [None]}},
        "evaluation.metrics must be a number, text, true or false, a list or a table",
    ),
    ({1: 2}, "the name of a field must be a text (got 1)"),
    ({"model": {"init": "a\0b"}}, "model.init must not contain a null character (got 'a\\x00b')"),
    ({"data": {"name": "\ud800"}}, "data.name must be valid Unicode (got '\\ud800')"),
    ({"data": {"name": "a" * 10_000}}, "data.name must have at most 4096 characters (got 10000, 'aaa"),
    ({"model": {"init": "a" * 300}}, "model.init must be a path (File name too long; got 'aaa"),
    ({"local": {"optimizer": [1]}}, "local.optimizer must be a valid string (got [1])"),
]


@pytest.mark.parametrize(("table", "message"), REFUSED)
def test_a_value_that_no_spec_can_have_is_refused_in_one_short_line(table: dict[Any, Any], message: str) -> None:
    with pytest.raises(KeelError) as caught:
        make_spec(table)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400


def test_a_spec_that_does_not_end_is_refused() -> None:
    with pytest.raises(KeelError, match="'/dev/zero' must have at most 10000000 characters"):
        read_spec(Path("/dev/zero"))


def test_a_name_that_cannot_be_printed_is_escaped_in_an_error() -> None:
    with pytest.raises(KeelError) as caught:
        override({}, ["network=1", "network.\0up_mbps=2"])
    assert str(caught.value) == r"--set: 'network.\x00up_mbps': 'network' is a field, not a table"


def test_a_long_value_is_shortened_in_an_error() -> None:
    with pytest.raises(KeelError, match=r"^rounds must be a valid integer \(got \[0, 0, .*\.\.\.\)$") as caught:
        make_spec({"rounds": [0] * 1000})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "9" * 5000, "a." * 3000 + "b = 1", "x = 2026-01-01"])
def test_a_file_with_such_values_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(text)
    with pytest.raises(KeelError, match=r"^[^\n]{1,400}$"):
        read_spec(tmp_path / "spec.toml")


@pytest.mark.parametrize("option", ["rounds=" + "9" * 5000, "rounds=" + "[" * 5000, "a." * 3000 + "b=1"])
def test_an_option_with_such_values_is_refused(option: str) -> None:
    with pytest.raises(KeelError, match=r"^[^\n]{1,400}$"):
        make_spec(override({}, [option]))


def test_a_table_that_contains_itself_is_refused() -> None:
    table: dict[str, Any] = {}
    table["model"] = table
    with pytest.raises(KeelError, match="is nested too deeply"):
        check_values(table)


def test_a_tuple_is_a_list_so_that_the_written_spec_is_equal() -> None:
    assert make_spec({"model": {"hidden": (8, 8)}}) == make_spec({"model": {"hidden": [8, 8]}})


def test_a_module_that_exits_when_it_is_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits_at_once.py").write_text("raise SystemExit('usage')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeelError, match=r"^data.name: cannot import 'exits_at_once:load' \(SystemExit: usage\)$"):
        make_spec({"data": {"name": "exits_at_once:load"}})


@pytest.mark.parametrize(("every", "last", "rounds"), [(10, 100, 400), (7, 3, 50), (1, 1, 1), (10, 5, 3), (3, 4, 12)])
def test_the_number_of_evaluations_is_that_of_the_rounds_that_are_due(every: int, last: int, rounds: int) -> None:
    evaluation = EvaluationSpec(every=every, last=last)
    assert evaluation.count(rounds) == sum(evaluation.due(t, rounds) for t in range(1, rounds + 1))
