"""What a run can take on disk and in RAM at the most, known before it begins; one that cannot fit is refused."""

import os
from bisect import bisect_right
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from keel.engines import at_once
from keel.engines.cluster import LOCAL
from keel.engines.cohort import Cohort
from keel.engines.pool import Pool
from keel.engines.ray import WAITING, Ray
from keel.errors import KeelError
from keel.memories import form_of, row_bytes
from keel.randomness import torch_draws
from keel.rounds import Training
from keel.task import Task
from keel.units import size

CHECKPOINT_ROUNDS = 100
"""After so many a checkpoint is made at the latest where clients remember: until then what they forgot takes room."""
ROUND_LINES = 350
"""Bytes of a round's lines in a run's folder, besides its cohort's."""
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """Bytes at the most. The program and the data are not in it."""

    disk: int
    ram: int
    clients: int
    """Those that may come to have a memory."""
    memory: int
    """Of one of them."""
    server: int
    """What the server keeps."""

    def __str__(self) -> str:
        each = f"{self.clients:,} clients may keep {size(self.memory)} each, some of it again until a checkpoint"
        kept = f" ({each})" if self.memory else ""
        return f"up to {size(self.disk)} on disk{kept}, {size(self.ram)} in RAM besides the program and the data"


def room_of(training: Training) -> Room:
    spec = training.spec
    model = training.parameters * 4
    kept = spec.algorithm.init_client(training.initial)
    precision = getattr(torch, spec.memory.precision)
    form = form_of({n: t.to(precision) if t.is_floating_point() else t for n, t in kept.items()})
    memory, handed = row_bytes(form), row_bytes(form_of(kept))
    if training.local_buffers and training.initial_buffers is not None:
        memory += training.initial_buffers.numel() * precision.itemsize
        handed += training.initial_buffers.numel() * 4
    cohort = training.sampler.size
    clients = min(training.sampler.clients, spec.rounds * cohort, spec.memory.keep or training.sampler.clients)
    server = sum(t.numel() * t.element_size() for t in spec.algorithm.init_server(training.initial).values())
    server += model * min(spec.rounds, spec.algorithm.history(training.sampler.period))
    updates = model * max(spec.evaluation.deviation, default=0)
    budget = int(spec.memory.ram_gb * 1e9)
    disk = memory * _rows(clients, cohort, spec.rounds) + 2 * (server + updates) + max(0, server - budget)
    disk += spec.rounds * (ROUND_LINES + 8 * cohort)
    ram = min(server, max(budget, 2 * model)) + 2 * updates + _training(training, model, handed) + _passes(training)
    return Room(disk, ram, clients if memory else 0, memory, server)


def check_room(training: Training, place: Path) -> Room:
    """What a run can take; one that would not fit in RAM or where its folder is to be is refused."""
    room = room_of(training)
    free, machine = disk_usage(check_place(place)).free, _machine()
    if room.disk > free:
        fields = ", ".join(_for_disk(training, room, free))
        raise KeelError(f"memory: {room}, but the disk has {size(free)} left; accepted: {fields}")
    if machine is not None and room.ram > machine:
        fields = ", ".join(_for_ram(training, room))
        raise KeelError(f"memory: {room}, but there are {size(machine)}; accepted: {fields}")
    return room


def check_place(place: Path) -> Path:
    """The folder in which a new one is to be made, or which is there."""
    there = next(parent for parent in [place.absolute(), *place.absolute().parents] if parent.exists())
    if not there.is_dir():
        raise KeelError(f"out: {str(there)!r} is a file; accepted: a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise KeelError(f"out: {str(there)!r} may not be written to; accepted: another folder")
    return there


def _training(training: Training, model: int, handed: int) -> int:
    """RAM for a round's clients, in models and memories: as measured, with a little more."""
    engine, cohort = training.engine, training.sampler.size
    inner = engine.engine if isinstance(engine, Pool | Ray) else engine
    group = min(cohort, getattr(inner, "group", 1))
    one = 14 * model + 9 * handed if group == 1 else group * (9 * model + 8 * handed)
    parent = 8 * model + 4 * handed
    if isinstance(engine, Pool):
        return parent + _processes(training) * (one + 3 * group * (model + 3 * handed))
    if isinstance(engine, Ray):
        waiting = min(cohort * (model + 2 * handed), max(WAITING, 3 * engine.count * group * (model + 2 * handed)))
        return parent + waiting + _processes(training) * one
    return one


def _passes(training: Training) -> int:
    """RAM for the passes through the model: what a forward pass keeps for the backward pass, with as much again."""
    local, data, algorithm = training.spec.local, training.task.data, training.spec.algorithm
    whole = algorithm.probes or "full_gradient" in algorithm.observes
    examples = min(max(local.batch, data.at_once if whole else 0), int(data.partition.sizes.max()))
    rows = min(training.sampler.size, Cohort.group) if training.engine.name == "cohort" else 1
    return 2 * _kept(training.task) * examples * rows * _processes(training)


def _kept(task: Task) -> int:
    """Bytes that a forward pass keeps of an example."""
    few = task.data.train[task.data.partition.indices[:2]]
    module, found = deepcopy(task.module).train(), dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch_draws(0, "trial"), saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = task.loss(module(task.data.prepare(few.inputs)), few.targets)  # which keeps them alive
    for own in module.parameters():
        found.pop(own.untyped_storage().data_ptr(), None)
    return sum(found.values()) // len(losses)


def _processes(training: Training) -> int:
    """Those of this machine that train: of a cluster's that others have started we do not know where they are."""
    engine = training.engine
    if isinstance(engine, Pool) or (isinstance(engine, Ray) and engine.cluster.address == LOCAL):
        return at_once(engine.name, engine.count, training.sampler.size)
    return 0 if isinstance(engine, Ray) else 1


def _for_disk(training: Training, room: Room, free: int) -> list[str]:
    """Fields with which it would take no more than what is free; where numbers are given, they do."""
    spec, cohort = training.spec, training.sampler.size
    fields = ["a smaller algorithm.tau"] * (spec.algorithm.history(training.sampler.period) > 0)
    if room.memory:
        left = free - (room.disk - room.memory * _rows(room.clients, cohort, spec.rounds))

        def taken(clients: int, rounds: int) -> int:
            return room.memory * _rows(clients, cohort, rounds)

        if spec.memory.precision == "float32" and taken(room.clients, spec.rounds) // 2 <= left:
            fields.append("memory.precision = 'float16'")
        if fewer := bisect_right(range(1, room.clients), left, key=lambda clients: taken(clients, spec.rounds)):
            fields.append(f"memory.keep = {fewer}")
        if fewer := bisect_right(range(1, spec.rounds), left, key=lambda n: taken(min(room.clients, n * cohort), n)):
            fields.append(f"rounds = {fewer}")
        fields.append("an algorithm without memory")
    return [*fields, "a folder on another disk"]


def _for_ram(training: Training, room: Room) -> list[str]:
    """Fields with which it would take less."""
    fields = []
    if room.server > 2 * training.parameters * 4:
        fields.append("a smaller memory.ram_gb")
    if _processes(training) > 1:
        fields.append("fewer engine.workers")
    if training.engine.name != "serial":
        fields.append("engine.name = 'serial'")
    return [*fields, "a smaller local.batch", "a smaller model"]


def _rows(clients: int, cohort: int, rounds: int) -> int:
    """Of the file of memories: a checkpoint's are written over only after the next, a client's only after its round."""
    return min(clients + min(clients, CHECKPOINT_ROUNDS * cohort) + cohort, rounds * cohort)


def _machine() -> int | None:
    """Bytes of RAM that this process can come to have, where the machine tells."""
    told = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        told.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in _limits():
        text = file.read_text().strip() if file.is_file() else ""
        told += [int(text)] if text.isdigit() else []
    return min((limit for limit in told if limit > 0), default=None)


def _limits() -> Iterator[Path]:
    """Where Linux says what this process's container or job may have, and those around it."""
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, kinds, path = line.split(":", 2)
        root = CGROUPS / kinds
        here = root / path.lstrip("/")
        if kinds in ("", "memory"):
            name = "memory.limit_in_bytes" if kinds else "memory.max"
            yield from (folder / name for folder in [here, *here.parents] if folder.is_relative_to(root))
