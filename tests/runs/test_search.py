"""What a sweep searches: its fields, the grids by name, the points."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel import KeelError, make_spec
from keel.randomness import draws
from keel.runs.search import Range, grids, make_plan, name_of, parse_over

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
    own = make_plan({**table, "search": {"grid": "paper-lenet", "fields": {"local.lr": [0.2]}}})
    assert {point["local.lr"] for point in own.points()} == {0.2}
    assert len(own.points()) == 5 * 3


def test_a_points_runs_are_on_the_validation_part_and_its_spec_is_not() -> None:
    plan = make_plan({"seed": 7, "search": {"fields": {"local.lr": [0.1]}, "seeds": 3}})
    assert [spec.seed for spec in plan.specs({"local.lr": 0.1})] == [7, 8, 9]
    assert {spec.evaluation.on for spec in plan.specs({"local.lr": 0.1})} == {"validation"}
    chosen = plan.chosen({"local.lr": 0.1})
    assert chosen == make_spec({"seed": 7, "local": {"lr": 0.1}})
    assert chosen.evaluation.on == "test"


def test_fields_are_named_with_and_without_quotes() -> None:
    nested = {"local": {"lr": {"low": 0.1, "high": 1.0}, "batch": [4, 8]}}
    full = {"local.lr": {"low": 0.1, "high": 1.0}, "local.batch": [4, 8]}
    search = {"method": "random", "points": 2}
    plans = [make_plan({"search": {**search, "fields": fields}}) for fields in (nested, full)]
    assert plans[0].axes == plans[1].axes == {"local.lr": Range(low=0.1, high=1.0), "local.batch": [4, 8]}


def test_random_points_are_all_different_and_more_begin_with_the_same() -> None:
    fields = {"local.lr": [0.1, 0.2, 0.3], "algorithm.beta": [0.8, 0.9]}
    search = {"method": "random", "fields": fields}
    six, two = (make_plan({"search": {**search, "points": n}}).points() for n in (6, 2))
    assert len({name_of(point) for point in six}) == 6
    for key, values in fields.items():
        assert {point[key] for point in six} == set(values)
    assert six[:2] == two


@given(st.floats(1e-6, 1.0), st.floats(1.5, 1e3), st.booleans(), st.integers(0, 100))
def test_a_range_gives_numbers_within_it(low: float, factor: float, log: bool, seed: int) -> None:
    axis = Range(low=low, high=low * factor, log=log)
    assert axis.low <= axis.draw(draws(seed, "sweep")) <= axis.high


def test_a_range_between_whole_numbers_gives_all_of_them_and_both_ends() -> None:
    for log in (False, True):
        stream, axis = draws(0, "sweep"), Range(low=2, high=5, log=log)
        assert {axis.draw(stream) for _ in range(200)} == {2, 3, 4, 5}


def test_a_logarithmic_range_is_even_over_magnitudes() -> None:
    stream, axis = draws(0, "sweep"), Range(low=1e-4, high=1.0, log=True)
    mean = sum(math.log10(axis.draw(stream)) for _ in range(2000)) / 2000
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
def test_over_is_values_or_a_range(text: str, field: Any) -> None:
    assert list(parse_over([text]).values()) == [field]


def test_names_of_points_are_names_of_files() -> None:
    assert name_of({"local.lr": 0.1, "local.schedule": "cosine"}) == "local.lr=0.1,local.schedule=cosine"
    odd = [name_of({"data.file": f"a/b {i}"}) for i in range(2)]
    assert odd[0] != odd[1]
    assert not {"/", " "} & set("".join(odd))
    assert len(name_of({"data.file": "x" * 1000})) < 150


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({}, "search.fields: nothing to search"),
        ({"method": "gird"}, "search.method: input should be 'grid', 'random' or 'optuna', not 'gird'"),
        ({"fields": {"local.rl": [1]}}, "local: 'rl' is not known"),
        ({"fields": {"local.lr": [0.1, -1.0]}}, "local.lr: input should be greater than 0, not -1.0"),
        ({"fields": {"local.lr": []}}, "search.fields: local.lr: []; accepted: a list"),
        ({"fields": {"local.lr": [0.1, 0.1]}}, "has a value twice"),
        ({"fields": {"seed": [1, 2]}}, "'seed' is not searched; accepted: search.seeds"),
        ({"fields": {"local.lr": {"low": 0.1, "high": 1.0}}}, "local.lr: a grid has no ranges"),
        ({"fields": {"local.lr": {"low": 1.0, "high": 0.1}}}, "local.lr: low = 1.0 is not below high = 0.1"),
        ({"fields": {"local.lr": {"low": 0.0, "high": 0.1, "log": True}}}, "local.lr: low = 0.0 has no logarithm"),
        ({"fields": {"local.lr": {"low": 0.0}}}, "local.lr: high: field required"),
        ({"fields": {"local.lr": [1.0]}, "points": 3}, "points = 3 goes with"),
        ({"fields": {"local.lr": [1.0]}, "method": "random"}, "needs points"),
        ({"fields": {"local.lr": [1.0]}, "method": "random", "points": 2}, "there are 1 combinations"),
        ({"fields": {"local.lr": [1.0]}, "pruner": "median"}, "pruner goes with method = 'optuna'"),
        ({"fields": {"local.lr": [1.0]}, "seeds": [3, 3]}, "has one twice"),
        ({"grid": "paper"}, "'paper' has none for digits with mlp; accepted: paper-lenet"),
        ({"grid": "papre"}, "did you mean 'paper'?"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_mistake_is_named_in_one_line(search: dict[str, Any], words: str) -> None:
    with pytest.raises(KeelError) as caught:
        make_plan({"search": search})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_method_that_the_paper_does_not_search_is_named() -> None:
    with pytest.raises(KeelError, match="'paper-lenet' has no 'localghbm'; accepted: fedavg"):
        make_plan({"algorithm": {"name": "localghbm"}, "search": {"grid": "paper-lenet"}})
