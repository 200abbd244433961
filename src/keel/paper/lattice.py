"""Search on a lattice without edges: where the best point is at the border of what was tried, the search goes further.

Each point that is tried next is a neighbour of the best point so far: first half a decade away along one field, then a
quarter of a decade, then along two fields. The search ends after a fixed number of trials, the same for every method.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from keel.runs.search_space import Point

DECADE = (1.0, 1.7, 3.0, 5.5)
"""Four values of a decade, whose ratios are nearly equal."""
COARSE, FINE = 2, 1
"""Steps in quarters of a decade."""

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Geometric:
    """A positive number without bounds, in quarters of a decade."""

    first: float
    """The value that is tried first; one of DECADE times a power of ten."""

    @property
    def start(self) -> int:
        return next(k for k in range(-40, 40) if self.value(k) == self.first)

    def value(self, position: int) -> float:
        decade, step = divmod(position, len(DECADE))
        return float(f"{DECADE[step]}e{decade}")

    def moved(self, position: int, step: int) -> int | None:
        return position + step


@dataclass(frozen=True)
class Listed:
    """One of a list of values, whose first and last are the limits of the field."""

    first: Any
    values: tuple[Any, ...]

    @property
    def start(self) -> int:
        return self.values.index(self.first)

    def value(self, position: int) -> Any:
        return self.values[position]

    def moved(self, position: int, step: int) -> int | None:
        """Return the next position in this direction, however long the step; None beyond the end."""
        moved = position + (1 if step > 0 else -1)
        return moved if 0 <= moved < len(self.values) else None


Axis = Geometric | Listed


def make_axis(description: Any) -> Axis:
    """Return the axis of a number to start from, or of {"start": value, "values": [...]}."""
    if isinstance(description, Mapping):
        return Listed(description["start"], tuple(description["values"]))
    return Geometric(float(description))


@dataclass(frozen=True)
class Lattice:
    """The points that a search may try."""

    axes: dict[str, Axis]

    def next_points(self, scores: Mapping[str, float], trials: int) -> list[Point]:
        """Return the points to try next; none if `trials` points have been tried.

        Args:
            scores: The score of each point that has been tried, by its `point_key`, in the order of the trials.
        """
        tried = self._tried(scores)
        start = tuple(axis.start for axis in self.axes.values())
        if start not in tried:
            found = [start, *self._ring(start, COARSE, 1)]
        else:
            best = max(tried, key=lambda position: tried[position])
            rings = (self._ring(best, step, fields) for step, fields in ((COARSE, 1), (FINE, 1), (FINE, 2)))
            found = next((new for ring in rings if (new := [p for p in ring if p not in tried])), [])
        return [self._point(position) for position in found[: max(0, trials - len(tried))]]

    def open_fields(self, chosen: Point, scores: Mapping[str, float]) -> list[str]:
        """Return the fields of which no smaller or no larger value has been tried around the chosen point.

        The limits of a field that has limits do not count.
        """
        tried = self._tried(scores)
        centre = self._coordinates(chosen)
        return [
            field
            for number, field in enumerate(self.axes)
            if not all(self._has_neighbour(centre, number, sign, tried) for sign in (1, -1))
        ]

    def _has_neighbour(self, centre: Coordinates, number: int, sign: int, tried: Mapping[Coordinates, float]) -> bool:
        moved = [self._moved(centre, {number: sign * step}) for step in (FINE, COARSE)]
        return moved[0] is None or any(position in tried for position in moved)

    def _ring(self, centre: Coordinates, step: int, fields: int) -> Iterator[Coordinates]:
        """Return the positions that differ from the centre by one step in this number of fields."""
        for numbers in combinations(range(len(self.axes)), fields):
            for signs in product((1, -1), repeat=fields):
                moves = {number: sign * step for number, sign in zip(numbers, signs, strict=True)}
                moved = self._moved(centre, moves)
                if moved is not None:
                    yield moved

    def _moved(self, position: Coordinates, moves: Mapping[int, int]) -> Coordinates | None:
        coordinates = list(position)
        for number, step in moves.items():
            moved = list(self.axes.values())[number].moved(position[number], step)
            if moved is None:
                return None
            coordinates[number] = moved
        return tuple(coordinates)

    def _point(self, position: Coordinates) -> Point:
        return {field: axis.value(k) for (field, axis), k in zip(self.axes.items(), position, strict=True)}

    def _tried(self, scores: Mapping[str, float]) -> dict[Coordinates, float]:
        return {self._coordinates(json.loads(key)): score for key, score in scores.items()}

    def _coordinates(self, point: Point) -> Coordinates:
        return tuple(_position(axis, point[field]) for field, axis in self.axes.items())


def point_key(point: Point) -> str:
    """Return a text that is equal for equal points."""
    return json.dumps(point)


def _position(axis: Axis, value: Any) -> int:
    return axis.values.index(value) if isinstance(axis, Listed) else Geometric(value).start
