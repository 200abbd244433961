"""What a run can take on disk and in RAM at the most, known before it begins; one that cannot fit is refused."""

from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

import torch

from keel.engines import at_once
from keel.engines.cohort import Cohort
from keel.errors import KeelError
from keel.memories import form_of, row_bytes
from keel.rounds import Training
from keel.units import size


@dataclass(frozen=True)
class Room:
    """Bytes at the most. Activations and the data are not in it."""

    disk: int
    ram: int
    clients: int
    """Those that may come to have a memory."""
    memory: int
    """Of one of them."""
    server: int
    """What the server keeps."""

    def words(self) -> str:
        each = f" ({self.clients:,} clients may keep {size(self.memory)} each)" if self.memory else ""
        return f"up to {size(self.disk)} on disk{each}, {size(self.ram)} in RAM besides the data"


def room_of(training: Training) -> Room:
    spec = training.spec
    model = training.parameters * 4
    kept = spec.algorithm.init_client(training.initial)
    precision = getattr(torch, spec.memory.precision)
    form = form_of({n: t.to(precision) if t.is_floating_point() else t for n, t in kept.items()})
    memory = row_bytes(form)
    if training.local_buffers and training.initial_buffers is not None:
        memory += training.initial_buffers.numel() * precision.itemsize
    cohort = training.sampler.size
    clients = min(training.sampler.clients, spec.rounds * cohort, spec.memory.keep or training.sampler.clients)
    server = sum(t.numel() * t.element_size() for t in spec.algorithm.init_server(training.initial).values())
    server += model * min(spec.rounds, spec.algorithm.history(training.sampler.period))
    budget = int(spec.memory.ram_gb * 1e9)
    rows = clients + min(clients, 100 * cohort)  # a checkpoint's own are written over only after the next
    disk = memory * rows * bool(memory) + 2 * server + max(0, server - budget)
    ram = min(server, max(budget, 2 * model)) + model * (4 + 4 * training.workers + cohort * bool(memory))
    if training.engine.name == "cohort":  # a group's matrices, and what is handed over between processes
        processes, group = at_once("cohort", training.workers, cohort), min(cohort, Cohort.group)
        ram += processes * group * 6 * model + (processes > 1) * 3 * processes * group * (2 * model + 2 * memory)
    return Room(disk, ram, clients if memory else 0, memory, server)


def check_room(training: Training, place: Path) -> Room:
    """What a run can take; one whose folder would not fit where it is to be is refused."""
    room = room_of(training)
    there = next(parent for parent in [place.absolute(), *place.absolute().parents] if parent.is_dir())
    free = disk_usage(there).free
    if room.disk > free:
        fields = ["fewer rounds"]
        if room.memory:
            fewest = max(1, free // (2 * room.memory) // 2)
            fields = ["memory.precision = 'float16'", f"memory.keep = {fewest}", "an algorithm without memory", *fields]
        if training.spec.algorithm.history(training.sampler.period):
            fields.insert(0, "a smaller algorithm.tau")
        raise KeelError(f"memory: {room.words()}, but {size(free)} are free; accepted: {', '.join(fields)}")
    return room
