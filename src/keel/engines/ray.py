"""The engine `ray`: Ray actors train the clients of a round on the cores of a cluster.

Each actor runs `serial` or `cohort` for a part of the cohort at a time, as the workers of `pool` do. Results come in
the order of the cohort, so they have the bits of `serial` or `cohort` whatever the number of actors. A node receives
the data once for all its actors. Each actor fetches the broadcast once per round. Client states stay with the driver
and travel with the clients' work. The clients of a lost actor or node are trained again on another one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from keel.algorithms.base import Message
from keel.core.client import ClientResult
from keel.core.engine import EngineDefaults, LazySequence, RoundSize, RoundWork, Workload
from keel.engines import dispatch
from keel.engines.cohort import Cohort
from keel.engines.dispatch import Lost
from keel.engines.ray_actor import (
    PackedWorkload,
    Trainer,
    to_array,
    to_array_or_none,
    to_arrays,
    to_tensors,
    unpack_result,
)
from keel.engines.ray_cluster import POLL, SCHEDULE_TIMEOUT, Cluster, is_connected, load_ray, one_line
from keel.engines.serial import Serial
from keel.errors import KeelError
from keel.signals import is_ending

MAX_CLIENTS, MIN_ITEMS = 8, 4
"""The largest number of clients in an item, and the items per actor that must remain for an item to have several."""
WAITING_BYTES = 2**30
"""Bytes of results that may wait for an earlier one of the cohort; beyond it actors wait."""


@dataclass(eq=False)
class Actor:
    """An actor as the driver sees it."""

    handle: Any
    loading: Any
    """The reference that is ready once the actor has loaded the workload; None after that."""
    scheduled: Any
    """The reference that is ready once a node runs the actor."""
    failed_starts: int
    """The number of consecutive failed starts when it was created."""
    load: int = 0
    """The number of items that it was given and has not finished."""


class LostError(Exception):
    """The result of a call was lost, with its actor or without."""


class Ray(EngineDefaults):
    """Distributes parts of a cohort over actors, each of which runs an engine like `engine`."""

    def __init__(self, engine: Serial | Cohort, workload: Workload, workers: int, cluster: Cluster):
        self.engine, self.workload, self.count, self.cluster = engine, workload, workers, cluster
        self.evaluator = engine.evaluator
        self.name = "ray" if isinstance(engine, Serial) else engine.name
        self.group, self.bit_identical = engine.group, engine.bit_identical
        self.actors: list[Actor] = []
        self.packed: dict[bool, Any] = {}
        self.failed_starts = 0

    def processes(self, cohort: int) -> int:
        return max(1, min(self.count, ceil(cohort / self.group)))

    def footprint(self, size: RoundSize) -> int:
        result = size.model + 2 * size.client_state
        rows = min(size.cohort, self.group)
        waiting = min(size.cohort * result, max(WAITING_BYTES, dispatch.window(self.count) * rows * result))
        here = self.processes(size.cohort) if self.cluster.is_local else 0  # other actors may run on other machines
        return 8 * size.model + 4 * size.client_state + waiting + here * self.engine.footprint(size)

    def probe(self, work: RoundWork) -> Iterator[Message]:
        with self.cluster.one_line_errors():
            for messages in self._round("probe", work):
                yield from map(to_tensors, messages)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        with self.cluster.one_line_errors():
            for results in self._round("train", work):
                yield from map(unpack_result, results)

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        with self.cluster.one_line_errors():
            reference = [self.cluster.ray.put((to_array(theta), to_array_or_none(buffers)))]
            for measured in self._run("measure", [(reference, part) for part in range(self.evaluator.parts)]):
                yield torch.tensor(measured)

    def close(self) -> None:
        """End the actors, and Ray if this engine started it. The next round starts new ones."""
        self.remove_actors()
        self.packed = {}
        self.cluster.leave()

    def _round(self, method: str, work: RoundWork) -> Iterator[list[Any]]:
        reference = [self.cluster.ray.put((to_arrays(work.received), work.ctx))]
        client_bytes = _bytes(work.received, work.client_states[0])
        parts = list(self._parts(work, client_bytes))

        def arguments(number: int) -> tuple[Any, ...]:
            part = parts[number]
            states, buffers = list(map(to_arrays, part.client_states)), list(map(to_array_or_none, part.buffers))
            return reference, part.cohort, states, buffers

        waiting = WAITING_BYTES // (len(parts[0].cohort) * client_bytes)
        return self._run(method, LazySequence(range(len(parts)), arguments), waiting)

    def _parts(self, work: RoundWork, client_bytes: int) -> Iterator[RoundWork]:
        """Split the cohort into items: its groups, or clients.

        An item has several clients while many are left and one at the end, so that no core waits for the last item.
        Clients with large messages come in smaller items.
        """
        if self.group > 1:
            yield from work.groups(self.group)
            return
        first, clients = 0, len(work.cohort)
        largest = min(MAX_CLIENTS, WAITING_BYTES // (dispatch.window(self.count) * client_bytes))
        while first < clients:
            size = max(1, min(largest, (clients - first) // (MIN_ITEMS * self.count)))
            yield work.part(first, first + size)
            first += size

    def _run(self, method: str, items: Sequence[tuple[Any, ...]], waiting: int = 0) -> Iterator[Any]:
        """Have the actors call a method with the arguments of each item; yield the results in order."""
        window = max(waiting, dispatch.window(self.count))
        return dispatch.in_order(len(items), window, _Call(self, method, items))

    def start_actors(self) -> None:
        """Start actors until there are as many as there should be. Those that no node has room for wait in Ray."""
        ray = self.cluster.ray
        while len(self.actors) < self.count:
            self.add_actor(ray.remote(num_cpus=1, num_gpus=self.cluster.gpus)(Trainer).remote())

    def add_actor(self, handle: Any) -> None:
        scheduled = handle.is_scheduled.remote()  # before load: an actor answers in order
        self.actors.append(Actor(handle, self._load(handle, by_file=True), scheduled, self.failed_starts))

    def remove_actors(self) -> None:
        for actor in list(self.actors):
            self._remove(actor)

    def _remove(self, actor: Actor) -> None:
        if actor in self.actors:
            self.actors.remove(actor)
            if is_connected():  # or the actor ended with the connection
                load_ray().kill(actor.handle)  # it may live on a node that cannot be reached

    def _load(self, handle: Any, by_file: bool) -> Any:
        """Have an actor load the workload, which is put into Ray's store once for all actors."""
        if by_file not in self.packed:
            self.packed[by_file] = self.cluster.ray.put(PackedWorkload.pack(self.workload, by_file))
        return handle.load.remote(type(self.engine), [self.packed[by_file]])

    def wait(self, references: list[Any]) -> list[Any]:
        """Wait until at least one of the references is ready, and return all that are.

        Raises:
            OSError: No node has had room for a worker for a long time.
            KeyboardInterrupt: The run is to end after this round, which no node computes.
        """
        ray, deadline = self.cluster.ray, monotonic() + SCHEDULE_TIMEOUT
        while not ray.wait(references, num_returns=1, timeout=POLL)[0]:
            if (monotonic() > deadline or is_ending()) and not self._is_any_scheduled():
                if is_ending():
                    raise KeyboardInterrupt
                raise OSError(f"Ray: no node has had room for a worker for {SCHEDULE_TIMEOUT:g} s")
        return ray.wait(references, num_returns=len(references), timeout=0)[0]

    def _is_any_scheduled(self) -> bool:
        """Return whether any actor is ready, or loads on a node."""
        if any(actor.loading is None for actor in self.actors):
            return True
        return bool(self.cluster.ray.wait([actor.scheduled for actor in self.actors], timeout=0)[0])

    def result(self, reference: Any, actor: Actor) -> Any:
        """Return the result of a call.

        Raises:
            LostError: The actor or the result was lost.
        """
        ray = self.cluster.ray
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except ray.exceptions.RayActorError as error:
            self._remove(actor)
            raise LostError(one_line(error)) from None
        except ray.exceptions.RayError as error:  # the actor lives, its result is lost
            raise LostError(one_line(error)) from None

    def finish_loading(self, reference: Any) -> None:
        """Note that an actor is ready, have it load again without files if it cannot open them, or remove it if lost.

        Actors that were created together count as one failed start, since a lost node takes all of its actors with it.
        A failed start does not count while another actor is ready.
        """
        actor = next(actor for actor in self.actors if actor.loading == reference)
        try:
            ready = self.result(reference, actor)
        except LostError as error:
            self._remove(actor)
            if actor.failed_starts == self.failed_starts and all(other.loading for other in self.actors):
                self.failed_starts += 1
            if self.failed_starts == dispatch.TRIES:
                raise OSError(f"Ray: workers do not start; the last error: {error}") from None
            return
        self.failed_starts = 0
        actor.loading = None if ready else self._load(actor.handle, by_file=False)


class _Call:
    """The actors of the engine during one operation."""

    def __init__(self, engine: Ray, method: str, items: Sequence[tuple[Any, ...]]):
        self.engine, self.method, self.items = engine, method, items
        self.under_way: dict[Any, tuple[int, Actor]] = {}

    def begin(self, number: int) -> bool:
        self.engine.start_actors()
        actor = dispatch.least_busy(actor for actor in self.engine.actors if actor.loading is None)
        if actor is None:
            return False
        reference = getattr(actor.handle, self.method).remote(*self.items[number])
        self.under_way[reference] = number, actor
        actor.load += 1
        return True

    def finished(self) -> Iterator[tuple[int, Any]]:
        loading = [actor.loading for actor in self.engine.actors if actor.loading]
        for reference in self.engine.wait([*self.under_way, *loading]):
            if reference not in self.under_way:
                self.engine.finish_loading(reference)
                continue
            number, actor = self.under_way.pop(reference)
            actor.load -= 1
            try:
                result = self.engine.result(reference, actor)
            except LostError as error:
                result = Lost(str(error))
            yield number, result

    def abandon(self) -> None:
        self.engine.remove_actors()


def _cause(error: Any) -> Exception:
    """Return the exception that an actor raised, as if it had been raised here."""
    if isinstance(error.cause, KeelError):
        return KeelError(str(error.cause))
    return RuntimeError(f"in a Ray actor:\n{error}")


def _bytes(*messages: Message) -> int:
    return sum(tensor.numel() * tensor.element_size() for message in messages for tensor in message.values())
