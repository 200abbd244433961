"""The search space of a sweep: fields, named grids, points."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel import KeelError, make_spec
from keel.core.randomness import keyed_rng
from keel.runs.search_space import Range, grids, make_plan, name_of, parse_over
from tests.conftest import one_line_error

GRIDS = [(name, method) for name, grid in grids().items() for method in grid["with"]]


@pytest.mark.parametrize(("name", "method"), GRIDS, ids=str)
def test_the_papers_best_values_are_points_of_its_grids(name: str, method: str) -> None:
    grid = grids()[name]
    for data in grid["data"]:
        table = {"data": {"name": data}, "model": {"name": grid["model"]}, "algorithm": {"name": method}}
        plan = make_plan({**table, "search": {"grid": "paper"}})
        assert plan.axes == {**grid["all"], **grid["with"][method]}
        best = make_spec(table).model_dump()
        for key, values in plan.axes.items():
            section, field = key.split(".")
            if best[section][field] != "period":  # tau = 1/C
                assert best[section][field] in values, (key, best[section][field])


def test_a_grid_has_every_combination_and_a_set_field_is_not_searched() -> None:
    table = {"data": {"name": "cifar10"}, "algorithm": {"name": "fedavg"}, "search": {"grid": "paper"}}
    assert len(make_plan(table).points()) == 5 * 4 * 3
    fixed = make_plan({**table, "local": {"weight_decay": 0.002}}, fixed=["local.weight_decay"])
    assert len(fixed.points()) == 5 * 4
    assert fixed.specs(fixed.points()[0])[0].local.weight_decay == 0.002
    changed = make_plan({**table, "search": {"grid": "paper-lenet", "fields": {"local.lr": [0.2]}}})
    assert {point["local.lr"] for point in changed.points()} == {0.2}
    assert len(changed.points()) == 5 * 3


def test_the_runs_of_a_point_use_validation_examples_and_its_spec_the_test_examples() -> None:
    plan = make_plan({"seed": 7, "search": {"fields": {"local.lr": [0.1]}, "seeds": 3}})
    assert [spec.seed for spec in plan.specs({"local.lr": 0.1})] == [7, 8, 9]
    assert {spec.evaluation.on for spec in plan.specs({"local.lr": 0.1})} == {"validation"}
    chosen = plan.chosen({"local.lr": 0.1})
    assert chosen == make_spec({"seed": 7, "local": {"lr": 0.1}})
    assert chosen.evaluation.on == "test"


def test_field_names_may_be_quoted_or_nested_tables() -> None:
    nested = {"local": {"lr": {"low": 0.1, "high": 1.0}, "batch": [4, 8]}}
    quoted = {"local.lr": {"low": 0.1, "high": 1.0}, "local.batch": [4, 8]}
    search = {"method": "random", "points": 2}
    plans = [make_plan({"search": {**search, "fields": fields}}) for fields in (nested, quoted)]
    assert plans[0].axes == plans[1].axes == {"local.lr": Range(low=0.1, high=1.0), "local.batch": [4, 8]}


def test_random_points_are_distinct_and_a_longer_search_starts_with_the_same() -> None:
    fields = {"local.lr": [0.1, 0.2, 0.3], "algorithm.beta": [0.8, 0.9]}
    search = {"method": "random", "fields": fields}
    six, two = (make_plan({"search": {**search, "points": n}}).points() for n in (6, 2))
    assert len({name_of(point) for point in six}) == 6
    for key, values in fields.items():
        assert {point[key] for point in six} == set(values)
    assert six[:2] == two


@given(st.floats(1e-6, 1.0), st.floats(1.5, 1e3), st.booleans(), st.integers(0, 100))
def test_draws_from_a_range_lie_within_it(low: float, factor: float, log: bool, seed: int) -> None:
    axis = Range(low=low, high=low * factor, log=log)
    assert axis.low <= axis.draw(keyed_rng(seed, "sweep")) <= axis.high


def test_an_integer_range_includes_both_ends() -> None:
    for log in (False, True):
        rng, axis = keyed_rng(0, "sweep"), Range(low=2, high=5, log=log)
        assert {axis.draw(rng) for _ in range(200)} == {2, 3, 4, 5}


def test_a_logarithmic_range_is_uniform_over_magnitudes() -> None:
    rng, axis = keyed_rng(0, "sweep"), Range(low=1e-4, high=1.0, log=True)
    mean = sum(math.log10(axis.draw(rng)) for _ in range(2000)) / 2000
    assert mean == pytest.approx(-2, abs=0.1)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("local.lr=0.1,1", [0.1, 1]),
        ("local.schedule=constant,cosine", ["constant", "cosine"]),
        ("model.hidden=[64],[64,32]", [[64], [64, 32]]),
        ("algorithm.nesterov=true,false", [True, False]),
        ("local.lr=0.001..1.0,log", {"low": 0.001, "high": 1.0, "log": True}),
        ("local.batch=4..16", {"low": 4, "high": 16, "log": False}),
    ],
)
def test_over_takes_values_or_a_range(text: str, field: Any) -> None:
    assert list(parse_over([text]).values()) == [field]


def test_the_name_of_a_point_is_a_valid_file_name() -> None:
    assert name_of({"local.lr": 0.1, "local.schedule": "cosine"}) == "local.lr=0.1,local.schedule=cosine"
    escaped = [name_of({"data.file": f"a/b {i}"}) for i in range(2)]
    assert escaped[0] != escaped[1]
    assert not {"/", " "} & set("".join(escaped))
    assert len(name_of({"data.file": "x" * 1000})) < 150


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({}, "search.fields is empty"),
        ({"method": "gird"}, "search.method must be 'grid', 'random' or 'optuna' (got 'gird')"),
        ({"fields": {"local.rl": [1]}}, "unknown local field 'rl'"),
        ({"fields": {"local.lr": [0.1, -1.0]}}, "local.lr must be greater than 0 (got -1.0)"),
        ({"fields": {"local.lr": []}}, "search.fields: local.lr must be a list of values"),
        ({"fields": {"local.lr": [0.1, 0.1]}}, "must be distinct"),
        ({"fields": {"seed": [1, 2]}}, "must not contain 'seed'; use search.seeds"),
        ({"fields": {"local.lr": {"low": 0.1, "high": 1.0}}}, "local.lr is a range; use a list of values"),
        ({"fields": {"local.lr": {"low": 1.0, "high": 0.1}}}, "local.lr: low must be below high (got 1.0 and 0.1)"),
        (
            {"fields": {"local.lr": {"low": 0.0, "high": 0.1, "log": True}}},
            "local.lr: low must be positive with log = true (got 0.0)",
        ),
        ({"fields": {"local.lr": {"low": 0.0}}}, "local.lr: high: field required"),
        ({"fields": {"local.lr": [1.0]}, "points": 3}, "points = 3 requires method"),
        ({"fields": {"local.lr": [1.0]}, "method": "random"}, "points must be set"),
        (
            {"fields": {"local.lr": [1.0]}, "method": "random", "points": 2},
            "must be at most 1, the number of combinations (got 2)",
        ),
        ({"fields": {"local.lr": [1.0]}, "pruner": "median"}, "pruner requires method = 'optuna'"),
        ({"fields": {"local.lr": [1.0]}, "seeds": [3, 3]}, "seeds must be distinct"),
        ({"grid": "paper"}, "'paper' has no grid for digits with mlp; known: paper-lenet"),
        ({"grid": "papre"}, "did you mean 'paper'?"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_invalid_search_gives_an_error_of_one_line(search: dict[str, Any], message: str) -> None:
    with one_line_error(message):
        make_plan({"search": search})


def test_a_grid_refuses_an_algorithm_that_it_lacks() -> None:
    with pytest.raises(KeelError, match="'paper-lenet' does not cover 'localghbm'; it covers fedavg"):
        make_plan({"algorithm": {"name": "localghbm"}, "search": {"grid": "paper-lenet"}})


@pytest.mark.parametrize(
    "search",
    [
        {"seeds": 10**9},
        {"method": "random", "points": 10**9},
        {"method": "random", "points": 10**4, "seeds": 10**4},
        {"fields": {f"{table}.lr": [0.1 + i for i in range(400)] for table in ("local", "server")}},
    ],
)
def test_more_runs_than_any_machine_can_do_are_refused(search: dict[str, Any]) -> None:
    with pytest.raises(KeelError, match=r"100,?000"):
        make_plan({"search": {"fields": {"local.lr": [0.1, 0.2]}, **search}})


def test_values_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(KeelError, match=r"^search.fields.local.lr must be a number, text, true or false, a list or"):
        make_plan({"search": {"fields": parse_over(["local.lr=2026-01-01,2026-01-02"])}})
