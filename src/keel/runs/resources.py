"""The disk and memory footprint of a run, estimated before it begins. A run that cannot fit is refused."""

import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from keel.algorithms import messages_of, step_vectors
from keel.core.choices import Precision
from keel.core.client_state import row_bytes, signature_of
from keel.core.client_state import stored as stored_state
from keel.core.copies import sharing_frozen
from keel.core.engine import RoundSize, one_client_footprint
from keel.core.loop import Loop
from keel.core.observers import size_in_bytes
from keel.core.ram import available_ram
from keel.core.task import Task
from keel.core.torch_randomness import keyed_torch_rng
from keel.core.training_state import BUFFERS
from keel.errors import KeelError
from keel.runs.build import Training
from keel.runs.model_record import model_record
from keel.units import size

CHECKPOINT_ROUNDS = 100
"""The longest interval between checkpoints where clients have states: until then replaced states occupy disk."""
CLIENT_INDEX = 300
"""Bytes of RAM for the row of a client's state and its checksum."""
SAVED_INDEX = 3 * 20
"""Bytes on disk for the same in the last two checkpoints and in the next one."""
ROUND_LINES = 350
"""Bytes that a round adds to the text files of a run, besides its list of clients."""


@dataclass(frozen=True)
class Footprint:
    """Peak bytes of a run, without the program and the data."""

    disk: int
    ram: int
    clients: int
    """The number of clients that may have state at the end."""
    client_state: int
    """The state of one client on disk."""
    server: int
    """The server state."""
    engine: str = ""
    """The engine that computes it, and why it trains one client at a time, if `auto` decided that."""
    privacy: str = ""
    """The noise and the epsilon of a private run."""

    def __str__(self) -> str:
        each = f"with {size(self.client_state)} of state"
        clients = f"1 client {each}" if self.clients == 1 else f"{self.clients:,} clients {each} each"
        states = f"{clients}, some stored up to three times for the last two checkpoints"
        detail = f" ({states})" if self.client_state else ""
        memory = f"{size(self.ram)} of peak memory, not counting the program and the data"
        return f"up to {size(self.disk)} on disk{detail} and {memory}"


def _engine_text(training: Training) -> str:
    engine = training.loop.engine
    reason = getattr(engine, "reason", "")  # a user's engine need not have one
    return f"{engine.name}, because {reason}" if reason else engine.name


def _privacy_text(training: Training) -> str:
    if training.privacy is None:
        return ""
    return f"{training.privacy}; keep the seed secret ({training.spec.seed}), by which the noise can be subtracted"


def footprint_of(training: Training) -> Footprint:
    """Estimate the footprint of a run."""
    spec, cohort = training.spec, training.loop.sampler.size
    model = training.loop.parameters * 4
    stored = _client_state_bytes(training, spec.memory.precision)
    clients = min(
        training.loop.sampler.clients, spec.rounds * cohort, spec.memory.keep or training.loop.sampler.clients
    )
    server = sum(t.numel() * t.element_size() for t in spec.algorithm.init_server(training.loop.initial).values())
    server += model * min(spec.rounds, spec.algorithm.history(training.loop.sampler.period))
    observed = model * (max(spec.evaluation.deviation, default=0) + bool(spec.evaluation.select))
    budget = int(spec.memory.ram_gb * 1e9)
    disk = stored * _rows(clients, cohort, spec.rounds) + 2 * (server + observed) + max(0, server - budget)
    disk += spec.rounds * (ROUND_LINES + 8 * cohort) + model_record(training).size
    ram = min(server, max(budget, 2 * model)) + 2 * observed + training.loop.engine.footprint(_round_size(training))
    ram += _held_reports(training)
    if stored:
        disk, ram = disk + SAVED_INDEX * clients, ram + CLIENT_INDEX * clients
    return Footprint(
        disk, ram, clients if stored else 0, stored, server, _engine_text(training), _privacy_text(training)
    )


def check_footprint(training: Training, path: Path) -> Footprint:
    """Estimate the footprint of a run whose folder will be at `path`.

    Raises:
        KeelError: The run would not fit on the disk or in RAM.
    """
    footprint = footprint_of(training)
    free, ram = disk_usage(check_output_folder(path)).free, available_ram()
    if footprint.disk > free:
        fixes = _one_of(_disk_fixes(training, footprint, free))
        raise KeelError(f"the run needs {footprint}, but only {size(free)} of disk space is free; use {fixes}")
    if ram is not None and footprint.ram > ram:
        fixes = _one_of(_ram_fixes(training, footprint))
        raise KeelError(f"the run needs {footprint}, but the machine has only {size(ram)} of RAM; use {fixes}")
    return footprint


def check_output_folder(path: Path) -> Path:
    """Return the nearest existing folder at or above `path`, in which a run's folder can be created.

    Raises:
        KeelError: It is a file, or it cannot be written to.
    """
    existing = next(parent for parent in [path.absolute(), *path.absolute().parents] if parent.exists())
    if not existing.is_dir():
        raise KeelError(f"out: {str(existing)!r} is a file; use a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise KeelError(f"out: {str(existing)!r} is not writable; use another folder")
    return existing


def _client_state_bytes(training: Training, precision: Precision) -> int:
    """Return the bytes of one client's state, its buffers included, with model-sized tensors in this precision."""

    loop = training.loop
    state = stored_state(loop.local.init_client(loop.initial), precision, loop.parameters)
    if loop.settings.local_buffers and loop.initial_buffers is not None:
        state[BUFFERS] = loop.initial_buffers
    return row_bytes(signature_of(state))


def _held_reports(training: Training) -> int:
    """Return the bytes of a cohort's reports and client states, which are held together where they are clipped."""
    loop = training.loop
    if loop.settings.clip is None:
        return 0
    _, uploads = messages_of(loop.algorithm, loop.initial, loop.participation.sizes)
    largest = max(size_in_bytes(message) for message in uploads)
    buffers = 0 if loop.initial_buffers is None else loop.initial_buffers.numel() * 4
    state = _client_state_bytes(training, "float32")
    return loop.sampler.size * (largest + state + 2 * buffers)  # of the buffers also their change


def _round_size(training: Training) -> RoundSize:
    local, data, algorithm = training.spec.local, training.loop.task.data, training.spec.algorithm
    full_gradients = algorithm.probes or "full_gradient" in algorithm.observes
    batch = max(min(local.batch, local.microbatch or local.batch), data.chunk_size if full_gradients else 0)
    return RoundSize(
        cohort=training.loop.sampler.size,
        model=training.loop.parameters * 4,
        client_state=_client_state_bytes(training, "float32"),
        activations=_activation_bytes(training.loop.task) * min(batch, int(data.partition.sizes.max())),
        steps=_step_bytes(training.loop),
    )


def _step_bytes(loop: Loop) -> int:
    """Return the bytes that pass from step to step: the state of the optimiser, and the algorithm's step state."""
    vectors = step_vectors(loop.algorithm, loop.initial, loop.participation.sizes) + loop.local.optimizer.vectors
    return vectors * loop.parameters * 4


def _activation_bytes(task: Task) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, per example."""
    examples = task.data.train[task.data.partition.indices[:2]]
    module, kept = sharing_frozen(task.module).train(), dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with keyed_torch_rng(0, "trial"), saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = task.loss(module(task.data.transform(examples.inputs)), examples.targets)  # keeps them allocated
    for parameter in module.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values()) // len(losses)


def _disk_fixes(training: Training, footprint: Footprint, free: int) -> list[str]:
    """Return changes of the spec with which the run fits on the disk; each of those with a number suffices."""
    spec, cohort = training.spec, training.loop.sampler.size
    fixes = ["a smaller algorithm.tau"] * (spec.algorithm.history(training.loop.sampler.period) > 0)
    if footprint.client_state:

        def states(clients: int, rounds: int) -> int:
            return footprint.client_state * _rows(clients, cohort, rounds)

        left = free - (footprint.disk - states(footprint.clients, spec.rounds))
        if spec.memory.precision == "float32" and states(footprint.clients, spec.rounds) // 2 <= left:
            fixes.append("memory.precision = 'float16'")
        if keep := bisect_right(range(1, footprint.clients), left, key=lambda clients: states(clients, spec.rounds)):
            fixes.append(f"memory.keep = {keep}")
        if rounds := bisect_right(
            range(1, spec.rounds), left, key=lambda rounds: states(min(footprint.clients, rounds * cohort), rounds)
        ):
            fixes.append(f"rounds = {rounds}")
        fixes.append("an algorithm without client state")
    return [*fixes, "a folder on another disk"]


def _ram_fixes(training: Training, footprint: Footprint) -> list[str]:
    """Return changes of the spec with which the run takes less RAM."""
    engine, round_size = training.loop.engine, _round_size(training)
    fixes = []
    if footprint.server > 2 * training.loop.parameters * 4:
        fixes.append("a smaller memory.ram_gb")
    if engine.processes(round_size.cohort) > 1:
        fixes.append("fewer engine.workers")
    if engine.footprint(round_size) > one_client_footprint(round_size):
        fixes.append("engine.name = 'serial'")
    return [*fixes, "a smaller local.batch", "a smaller model"]


def _one_of(fixes: list[str]) -> str:
    return fixes[0] if len(fixes) == 1 else f"one of: {', '.join(fixes)}"


def _rows(clients: int, cohort: int, rounds: int) -> int:
    """Return the rows of the file of client states.

    A row that a checkpoint refers to is overwritten only after the second checkpoint from there, and a client's old row
    only after its round.
    """
    return min(clients + 2 * min(clients, CHECKPOINT_ROUNDS * cohort) + cohort, rounds * cohort)
