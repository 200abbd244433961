"""Past one machine: the clients of a round trained by Ray's actors, wherever the cluster has a core to give.

Each actor is `serial`, or `cohort`, for a part of the cohort at a time, as the workers of `pool` are, and results come
in the order of the cohort: the bits are theirs, whatever the number of actors. The data reach a node once and are
shared by its actors; the broadcast is put once per round. What clients remember stays with the driver and travels with
their work. An actor or a node that is lost costs the clients it was at work on, which are trained again elsewhere.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import Memory, Message
from keel.client import ClientResult
from keel.data.federated import Examples
from keel.data.store import file_of
from keel.devices import find_device
from keel.engines.allocator import tune
from keel.engines.base import Each, Problem, RoundWork, Simulated
from keel.engines.cluster import Cluster, load_ray, one_line
from keel.engines.cohort import Cohort
from keel.engines.serial import Serial
from keel.errors import KeelError

AHEAD = 2
"""Orders that an actor has at a time: one that it works on and one that it goes on with."""
MOST, EACH = 8, 4
"""Clients of one order at the most, and orders of each actor that are left at the least where an order has several."""
WAITING = 2**30
"""Bytes of results that may wait for an earlier one of the cohort; beyond it actors wait."""
TRIES = 3
"""How often a group is lost with its actor, or actors with their start, before the run is given up."""
ROOM_WITHIN, LOOK = 600.0, 1.0
"""Seconds for a node to take an actor where none is at work, and between two looks, at which signals are heard.

A node that has to be started first, or that is busy, takes minutes.
"""

Arrays = dict[str, Any]
"""Tensors as numpy's arrays, which Ray lays in memory that the processes of a node share."""


@dataclass(frozen=True)
class Stored:
    """An array in a file that other nodes may reach too."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    def open(self) -> np.ndarray:
        array = np.load(self.path, mmap_mode="c", allow_pickle=False)
        if array.shape != self.shape or array.dtype.str != self.dtype:
            raise FileNotFoundError(self.path)
        return array


@dataclass(frozen=True)
class Parcel:
    """A problem on its way to a node: its examples apart, as arrays or as the files they lie in."""

    problem: Problem
    examples: tuple[np.ndarray | Stored, ...]
    versions: dict[str, str]

    @classmethod
    def of(cls, problem: Problem, by_file: bool) -> "Parcel":
        task, data = problem.task, problem.task.data
        tensors = (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets)
        few = replace(data, train=data.train[np.arange(1)], test=data.test[np.arange(1)])
        examples = tuple(_stored(tensor.numpy(), by_file) for tensor in tensors)
        return cls(replace(problem, task=replace(task, data=few)), examples, versions())

    def opened(self) -> Problem:
        arrays = [each.open() if isinstance(each, Stored) else each for each in self.examples]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory is for reading alone, and nobody writes
            inputs, targets, *test = (torch.from_numpy(array) for array in arrays)
        data = replace(self.problem.task.data, train=Examples(inputs, targets), test=Examples(*test))
        return replace(self.problem, task=replace(self.problem.task, data=data))


class Trainer:
    """An actor: one core, one thread, and all that it needs to train any client."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        tune()
        self.shared: Any = None

    def is_there(self) -> None:
        """Answers once a node has taken it, however long it then loads."""

    def load(self, kind: type[Serial] | type[Cohort], boxed: list[Any]) -> bool:
        """Makes ready; False where a file cannot be reached from here."""
        ray = load_ray()
        try:
            parcel = ray.get(boxed[0])
            problem = parcel.opened()
        except FileNotFoundError:
            return False
        here = versions()
        for what, value in parcel.versions.items():
            if here[what] != value:
                raise KeelError(
                    f"engine.address: {what} is {here[what]!r} on {ray.util.get_node_ip_address()} and {value!r} here; "
                    "accepted: the same on every node"
                )
        find_device(problem.device.type)
        self.engine = kind(problem)
        return True

    def train(self, boxed: list[Any], cohort: np.ndarray, memories: list[Arrays], buffers: list[Any]) -> list[Any]:
        return [_sent(result) for result in self.engine.train(self._work(boxed, cohort, memories, buffers))]

    def probe(self, boxed: list[Any], cohort: np.ndarray, memories: list[Arrays], buffers: list[Any]) -> list[Arrays]:
        return [_arrays(message) for message in self.engine.probe(self._work(boxed, cohort, memories, buffers))]

    def measure(self, boxed: list[Any], part: int) -> np.ndarray:
        theta, buffers = self._opened(boxed)
        self.engine.evaluator.look_at(theta, buffers)
        return self.engine.evaluator.measure(part).numpy()

    def _work(self, boxed: list[Any], cohort: np.ndarray, memories: list[Arrays], buffers: list[Any]) -> RoundWork:
        received, ctx = self._opened(boxed)
        return RoundWork(cohort, received, list(map(_tensors, memories)), ctx, list(map(_tensor, buffers)))

    def _opened(self, boxed: list[Any]) -> tuple[Any, Any]:
        """What is the same for all of a round, fetched once. It comes in a list, or Ray would fetch it every time."""
        if self.shared is None or self.shared[0] != boxed[0]:
            first, second = load_ray().get(boxed[0])
            known = _tensors(first) if isinstance(first, dict) else _tensor(first)
            self.shared = boxed[0], (known, _tensor(second) if isinstance(second, np.ndarray) else second)
        return self.shared[1]


@dataclass(eq=False)
class Hand:
    """An actor as its driver sees it."""

    actor: Any
    starting: Any
    """What it answers once it is ready; None when it has."""
    there: Any
    """What it answers once a node has taken it."""
    failed_before: int
    """The starts in a row that had failed when it was asked for."""
    orders: int = 0


class Ray(Simulated):
    def __init__(self, engine: Serial | Cohort, problem: Problem, workers: int, cluster: Cluster):
        self.engine, self.problem, self.count, self.cluster = engine, problem, workers, cluster
        self.evaluator = engine.evaluator
        self.name = "ray" if isinstance(engine, Serial) else engine.name
        self.hands: list[Hand] = []
        self.parcels: dict[bool, Any] = {}
        self.failed_starts = 0

    def probe(self, work: RoundWork) -> Iterator[Message]:
        with self.cluster.telling():
            for results in self._round("probe", work):
                yield from map(_tensors, results)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        with self.cluster.telling():
            for results in self._round("train", work):
                for message, memory, steps, loss, buffers in results:
                    yield ClientResult(_tensors(message), _tensors(memory), steps, torch.tensor(loss), _tensor(buffers))

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        with self.cluster.telling():
            boxed = [self.cluster.ray.put((_array(theta), _array_or_none(buffers)))]
            for measured in self._done("measure", [(boxed, part) for part in range(len(self.evaluator.parts))]):
                yield torch.tensor(measured)

    def close(self) -> None:
        """Ends the actors, and Ray where it was started for them; they start again when they are needed."""
        self._dismiss()
        self.parcels = {}
        self.cluster.leave()

    def _round(self, what: str, work: RoundWork) -> Iterator[list[Any]]:
        boxed = [self.cluster.ray.put((_arrays(work.received), work.ctx))]
        each = _bytes(work.received, work.memories[0])
        parts = list(self._parts(work, each))

        def order(number: int) -> tuple[Any, ...]:
            part = parts[number]
            return boxed, part.cohort, list(map(_arrays, part.memories)), list(map(_array_or_none, part.buffers))

        orders = Each(range(len(parts)), order)
        return self._done(what, orders, WAITING // (len(parts[0].cohort) * each))

    def _parts(self, work: RoundWork, each: int) -> Iterator[RoundWork]:
        """The cohort in orders: its groups, or clients, several while many are left, one each in the end, so that no
        core waits.

        Clients have so many bytes each; where they are large, fewer go into an order.
        """
        if self.engine.group > 1:
            yield from work.groups(self.engine.group)
            return
        first, clients = 0, len(work.cohort)
        most = min(MOST, WAITING // ((AHEAD + 1) * self.count * each))
        while first < clients:
            size = max(1, min(most, (clients - first) // (EACH * self.count)))
            yield work.part(first, first + size)
            first += size

    def _done(self, what: str, orders: Sequence[tuple[Any, ...]], waiting: int = 0) -> Iterator[Any]:
        """Has the actors carry out each of the orders; the results, in their order.

        Orders begin in their order, each with the actor that has least to do. One whose actor is lost begins again.
        """
        ahead = max(waiting, (AHEAD + 1) * self.count)
        todo, results = list(range(len(orders))), dict[int, Any]()
        under_way = dict[Any, tuple[int, Hand]]()
        lost = [0] * len(orders)
        heapify(todo)
        try:
            for due in range(len(orders)):
                while due not in results:
                    self._staff()
                    while todo and todo[0] < due + ahead and (hand := self._idle()):
                        number = heappop(todo)
                        under_way[getattr(hand.actor, what).remote(*orders[number])] = number, hand
                        hand.orders += 1
                    for ref in self._ready([*under_way, *(hand.starting for hand in self.hands if hand.starting)]):
                        if ref not in under_way:
                            self._welcome(ref)
                            continue
                        number, hand = under_way.pop(ref)
                        hand.orders -= 1
                        try:
                            results[number] = self._answer(ref, hand)
                        except _LostError as error:
                            lost[number] += 1
                            if lost[number] == TRIES:
                                raise OSError(
                                    f"Ray: what a worker was at was lost {TRIES} times; the last time: {error}"
                                ) from None
                            heappush(todo, number)
                yield results.pop(due)
        finally:
            if under_way:  # given up in between: the answers are nobody's
                self._dismiss()

    def _ready(self, refs: list[Any]) -> list[Any]:
        """Those that are answered, one at least. However many are under way, a look at all is for all that came."""
        ray, until = self.cluster.ray, monotonic() + ROOM_WITHIN
        while not ray.wait(refs, num_returns=1, timeout=LOOK)[0]:
            if monotonic() > until and not self._anybody():
                raise OSError(f"Ray: no node has had room for a worker for {ROOM_WITHIN:g} s")
        return ray.wait(refs, num_returns=len(refs), timeout=0)[0]

    def _anybody(self) -> bool:
        """Whether any actor is ready, or loads on a node that has taken it."""
        there = [hand.there for hand in self.hands]
        return any(hand.starting is None for hand in self.hands) or bool(self.cluster.ray.wait(there, timeout=0)[0])

    def _answer(self, ref: Any, hand: Hand) -> Any:
        ray = self.cluster.ray
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except ray.exceptions.RayActorError as error:
            self._drop(hand)
            raise _LostError(one_line(error)) from None
        except ray.exceptions.RayError as error:  # the actor is there, what it gave is not
            raise _LostError(one_line(error)) from None

    def _staff(self) -> None:
        """As many actors as there are to be. Those that no node has room for wait, and the others work."""
        ray = self.cluster.ray
        while len(self.hands) < self.count:
            self.hands.append(self._hand(ray.remote(num_cpus=1, num_gpus=self.cluster.gpus)(Trainer).remote()))

    def _hand(self, actor: Any) -> Hand:
        there = actor.is_there.remote()  # asked first: an actor answers in order
        return Hand(actor, self._load(actor, by_file=True), there, self.failed_starts)

    def _load(self, actor: Any, by_file: bool) -> Any:
        """Gives an actor the task; the parcel is put for all of them, once."""
        if by_file not in self.parcels:
            self.parcels[by_file] = self.cluster.ray.put(Parcel.of(self.problem, by_file))
        return actor.load.remote(type(self.engine), [self.parcels[by_file]])

    def _welcome(self, ref: Any) -> None:
        """An actor that has started: it is ready, or cannot reach the files, or is lost already.

        Of those that were asked for together one counts: a node takes all of its actors with it. None does while
        others are ready.
        """
        hand = next(hand for hand in self.hands if hand.starting == ref)
        try:
            ready = self._answer(ref, hand)
        except _LostError as error:
            self._drop(hand)
            if hand.failed_before == self.failed_starts and all(other.starting for other in self.hands):
                self.failed_starts += 1
            if self.failed_starts == TRIES:
                raise OSError(f"Ray: workers do not start; the last one: {error}") from None
            return
        self.failed_starts = 0
        hand.starting = None if ready else self._load(hand.actor, by_file=False)

    def _idle(self) -> Hand | None:
        hands = [hand for hand in self.hands if hand.starting is None and hand.orders < AHEAD]
        return min(hands, key=lambda hand: hand.orders, default=None)

    def _drop(self, hand: Hand) -> None:
        if hand in self.hands:
            self.hands.remove(hand)
            self.cluster.ray.kill(hand.actor)  # where it can be reached no more but lives

    def _dismiss(self) -> None:
        for hand in list(self.hands):
            self._drop(hand)


class _LostError(Exception):
    """What was asked of an actor will not come."""


def versions() -> dict[str, str]:
    """What has to be the same on every node for the bits to be."""
    from keel.runs.folder import environment

    return {what: value for what, value in environment().items() if what in ("source_sha256", "torch", "numpy")}


def _cause(error: Any) -> Exception:
    """What an actor raised, as if it had been raised here."""
    if isinstance(error.cause, KeelError):
        return KeelError(str(error.cause))
    return RuntimeError(f"in a Ray actor:\n{error}")


def _stored(array: np.ndarray, by_file: bool) -> np.ndarray | Stored:
    file = file_of(array) if by_file else None
    return array if file is None else Stored(file, array.shape, array.dtype.str)


def _sent(result: ClientResult) -> tuple[Any, ...]:
    buffers = _array_or_none(result.buffers)
    return _arrays(result.message), _arrays(result.memory), result.steps, float(result.loss), buffers


def _bytes(*messages: Message) -> int:
    return sum(tensor.numel() * tensor.element_size() for message in messages for tensor in message.values())


def _arrays(tensors: Message) -> Arrays:
    return {name: _array(value) for name, value in tensors.items()}


def _array(tensor: Tensor) -> Any:
    return tensor if tensor.dtype == torch.bfloat16 else tensor.detach().numpy()  # which numpy does not know


def _array_or_none(tensor: Tensor | None) -> Any:
    return None if tensor is None else _array(tensor)


def _tensors(arrays: Arrays) -> Memory:
    return {name: _tensor(value) for name, value in arrays.items()}


def _tensor(array: Any) -> Any:
    """A copy: Ray's memory is for reading alone, and stays taken for as long as it is looked at."""
    return array if array is None or isinstance(array, Tensor) else torch.tensor(array)
