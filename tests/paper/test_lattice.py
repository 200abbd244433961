"""The search for hyper-parameters on a lattice without edges."""

import json
from collections.abc import Callable
from math import log10

import pytest

from keel.paper.lattice import Geometric, Lattice, Listed, make_axis, point_key
from keel.paper.recipes import all_recipes
from keel.runs.search_space import Point


def searched(lattice: Lattice, score: Callable[[Point], float], trials: int) -> dict[str, float]:
    """Run a search to its end and return the scores."""
    scores: dict[str, float] = {}
    while points := lattice.next_points(scores, trials):
        assert not {point_key(point) for point in points} & scores.keys()
        scores |= {point_key(point): score(point) for point in points}
    return scores


def best(scores: dict[str, float]) -> Point:
    return json.loads(max(scores, key=lambda key: scores[key]))


def test_a_geometric_axis_has_four_values_per_decade() -> None:
    axis = Geometric(0.1)
    assert [axis.value(axis.start + k) for k in range(-2, 5)] == [0.03, 0.055, 0.1, 0.17, 0.3, 0.55, 1.0]


@pytest.mark.parametrize(("lr", "server"), [(0.1, 1.0), (30.0, 0.003), (0.00055, 1.7)])
def test_the_search_finds_an_optimum_far_from_its_start(lr: float, server: float) -> None:
    lattice = Lattice({"local.lr": make_axis(0.1), "server.lr": make_axis(1.0)})

    def score(point: Point) -> float:
        return -abs(log10(point["local.lr"] / lr)) - abs(log10(point["server.lr"] / server))

    scores = searched(lattice, score, 40)
    assert best(scores) == {"local.lr": lr, "server.lr": server}
    assert lattice.open_fields(best(scores), scores) == []


def test_every_search_has_the_same_number_of_trials() -> None:
    own = make_axis({"start": 0.9, "values": [0.5, 0.8, 0.9, 1.0]})
    for axes in ({"local.lr": make_axis(0.1)}, {"local.lr": make_axis(0.1), "server.lr": make_axis(1.0), "beta": own}):
        scores = searched(Lattice(axes), lambda point: -abs(log10(point["local.lr"])), 15)
        assert len(scores) == 15 or len(axes) == 1


def test_a_search_that_ends_at_the_border_of_what_it_tried_says_so() -> None:
    lattice = Lattice({"local.lr": make_axis(0.1), "server.lr": make_axis(1.0)})
    scores = searched(lattice, lambda point: point["local.lr"], 9)
    assert lattice.open_fields(best(scores), scores)[0] == "local.lr"


def test_a_listed_axis_ends_at_its_limits() -> None:
    lattice = Lattice({"algorithm.beta": Listed(0.9, (0.0, 0.9, 1.0))})
    scores = searched(lattice, lambda point: point["algorithm.beta"], 15)
    assert [best(scores), len(scores)] == [{"algorithm.beta": 1.0}, 3]
    assert lattice.open_fields(best(scores), scores) == []


def test_a_search_ends_if_every_point_diverges() -> None:
    lattice = Lattice({"local.lr": make_axis(0.1)})
    assert best(searched(lattice, lambda point: float("-inf"), 5)) == {"local.lr": 0.1}


def test_every_search_of_the_recipes_has_a_start() -> None:
    for recipe in all_recipes().values():
        for part in (*recipe.desktop, *recipe.smoke):
            for method in part.methods:
                lattice = part.lattice(method)
                assert lattice is None or len(lattice.next_points({}, 1)) == 1
