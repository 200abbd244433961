"""The engine `cohort`: a group of clients as one batched program, for models so small that Python's overhead dominates.

The weights are one (clients, parameters) matrix. The model's forward and backward pass over all rows is recorded once
per shape (`program.py`). The algorithm's functions run on all rows of the matrix together. Results agree with `serial`
to rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import ClientState, Context, Message, Path, State
from keel.core.client import GATHERED, ClientResult, PathStatistics, clip_norm_, local_step, to_device
from keel.core.client_state import algorithm_state
from keel.core.engine import CPU, InProcess, RoundWork, Workload
from keel.core.losses import batched_loss
from keel.engines.batching import SMALL_WORK, work_per_step_operation
from keel.engines.kinds import ENGINES
from keel.engines.stacked_gradients import CompiledGradients, RecordedGradients

Minibatches = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets and each example's share in its client's mean; one row per client."""

GROUP = ENGINES["cohort"].group
"""The largest number of clients in one program, whatever the number of workers."""
SMALL_GROUP = 8
"""The same for models whose operations do more work, so that more cores share a cohort."""
NARROW = 32
"""Minibatches of up to this many examples are padded to one width: a second program would cost more."""


@dataclass(frozen=True)
class Plan:
    """The minibatches of a round: the examples of all clients concatenated, and the size of each minibatch."""

    examples: np.ndarray
    choices: np.ndarray | None
    """The random draws of the transform, one per example."""
    sizes: np.ndarray
    """One row per client, one column per step; 0 after a client's last step."""

    @classmethod
    def of(cls, examples: list[np.ndarray], choices: list[np.ndarray | None], sizes: list[list[int]]) -> "Plan":
        table = np.zeros((len(sizes), max(map(len, sizes))), dtype=np.int64)
        for row, minibatches in enumerate(sizes):
            table[row, : len(minibatches)] = minibatches
        drawn = [draw for draw in choices if draw is not None]
        return cls(np.concatenate(examples), np.concatenate(drawn) if drawn else None, table)

    @property
    def steps(self) -> np.ndarray:
        """The number of local steps of each client."""
        return (self.sizes > 0).sum(1)

    @property
    def starts(self) -> np.ndarray:
        """The position in `examples` at which each minibatch begins."""
        return np.cumsum(self.sizes).reshape(self.sizes.shape) - self.sizes


class Cohort(InProcess):
    """Trains groups of clients, each as one batched program."""

    name = "cohort"
    group = GROUP

    def __init__(self, workload: Workload):
        super().__init__(workload)
        if self.device == CPU and work_per_step_operation(workload.task, self.local) > SMALL_WORK:
            self.group = SMALL_GROUP
        self._input_elements = prod(self.data.input_shape)
        self._loss = batched_loss(self.local.loss)
        self._gradients: RecordedGradients | CompiledGradients = RecordedGradients(self._losses)
        if workload.compile:
            self._gradients = CompiledGradients(self._losses, self.local.config.batch, self.local.chunk)

    def probe(self, work: RoundWork) -> Iterator[Message]:
        for group in work.groups(self.group):
            theta = work.received["theta"].to(self.device)
            gradients = self._full_gradients(theta, group.cohort, work.ctx, len(group.cohort)).to(CPU)
            for client, row in zip(group.cohort.tolist(), gradients, strict=True):
                yield self.local.send_probe({"gradient": row}, work.ctx.round, client)

    def train(self, work: RoundWork) -> Iterator[ClientResult]:
        work = replace(work, received=to_device(work.received, self.device))
        for group in work.groups(self.group):
            results: dict[int, ClientResult] = {}
            for rows in self._programs(group.cohort, self.local.config.batch):
                trained = self._train(group.of(rows, group.ctx), len(group.cohort))
                results.update(zip(rows, trained, strict=True))
            yield from (results[row] for row in range(len(group.cohort)))

    def _programs(self, cohort: np.ndarray, batch: int) -> Iterator[list[int]]:
        """Yield the rows that form one program, for minibatches of at most `batch` examples.

        Clients with most examples come first, so that those still training are always the first rows and none waits.
        In one program the smallest minibatch has at least half as many examples as the largest, which limits padding.
        """
        sizes = self.data.partition.sizes_of(cohort)
        left = np.argsort(-sizes, kind="stable")
        while len(left):
            widths = np.minimum(sizes[left], batch)
            alike = (2 * widths >= widths[0]) | (widths[0] <= NARROW)
            yield left[alike].tolist()
            left = left[~alike]

    def _train(self, work: RoundWork, group: int) -> list[ClientResult]:
        """Train clients, those with most examples first, as one program. Their group has `group` clients."""
        algorithm, local = self.local.algorithm, self.local.config
        plan = self._plan(work)
        stacked = to_device(stack_states(work.client_states), self.device)
        state = algorithm_state(stacked)
        column = torch.from_numpy(plan.steps).float()[:, None].to(self.device)
        ctx = work.ctx.for_client(column)
        start, full = algorithm.start(work.received, state, ctx), None
        w = start.expand(len(work.cohort), -1).clone()
        if "full_gradient" in algorithm.observes:
            full = self._full_gradients(start, work.cohort, work.ctx, group)
        optimizer = self.local.optimizer.start(w, stacked)
        statistics = PathStatistics(
            w.new_zeros(len(w)), torch.zeros_like(w) if "mean_gradient" in algorithm.observes else None
        )
        gradients_of = self._gradients.for_group(group)
        rows, active_state = w, state
        final = StepStates(algorithm.init_steps(work.received, state, ctx), len(w))
        step_state = final.rows(len(w))
        for minibatches in self._minibatches(plan):
            active = slice(len(minibatches[2]))
            if len(rows) > active.stop:  # some clients have taken their last step
                rows, active_state = w[active], {name: value[active] for name, value in state.items()}
                step_state = final.rows(active.stop)
                ctx = work.ctx.for_client(column[active])
            statistics.begin_step(active)

            def gradient(point: Tensor, rows: Tensor = rows, minibatches: Minibatches = minibatches) -> Tensor:
                point = point if point is rows else point.expand_as(rows)
                losses, gradients = gradients_of(point, *minibatches)
                return statistics(losses, clip_norm_(gradients, local.clip))

            step_state = local_step(algorithm, optimizer, rows, gradient, work.received, active_state, step_state, ctx)
            final.update(step_state)
        mean = None if statistics.gradients is None else statistics.gradients / column
        path = Path(start.expand_as(w), w, mean_gradient=mean, full_gradient=full, step_state=final.rows(len(w)))
        message, state = algorithm.report(path, work.received, state, work.ctx.for_client(column))
        state = {**state, **optimizer.client_state()}
        losses = statistics.losses / column[:, 0]
        results = _results(to_device(message, CPU), to_device(state, CPU), plan.steps, losses.to(CPU))
        return [
            self.local.send(result, before, work.ctx.round, client)
            for client, before, result in zip(work.cohort.tolist(), work.client_states, results, strict=True)
        ]

    def _plan(self, work: RoundWork) -> Plan:
        """Return the minibatches of local training."""
        examples, choices, sizes = [], [], []
        for client in work.cohort.tolist():
            indices = self.data.partition[client]
            examples.append(indices[self.local.order(len(indices), work.ctx.round, client)])
            sizes.append(self.local.config.sizes(len(indices)))
            choices += self.local.augmentations([len(examples[-1])], "preparation", work.ctx.round, client)
        return Plan.of(examples, choices, sizes)

    def _full_gradients(self, point: Tensor, cohort: np.ndarray, ctx: Context, group: int) -> Tensor:
        """Return each client's gradient over all its examples, at one point or at a row per client."""
        gradients = point.new_empty(len(cohort), point.shape[-1])
        for rows in self._programs(cohort, self.local.chunk):
            at = point if point.dim() == 1 else point[rows]
            gradients[rows] = self._full_gradients_of(at, cohort[rows], ctx, group)
        return gradients

    def _full_gradients_of(self, point: Tensor, cohort: np.ndarray, ctx: Context, group: int) -> Tensor:
        """Return the full gradients of clients, those with most examples first, as one program, chunk by chunk."""
        examples, choices, sizes, chunk = [], [], [], self.local.chunk
        for client in cohort.tolist():
            examples.append(indices := self.data.partition[client])
            choices += self.local.augmentations([len(indices)], "full preparation", ctx.round, client)
            sizes.append([min(chunk, len(indices) - first) for first in range(0, len(indices), chunk)])
        plan = Plan.of(examples, choices, sizes)
        counts = torch.from_numpy(plan.sizes.sum(1, keepdims=True)).to(self.device)
        rows = point.expand(len(cohort), -1)
        total, gradients_of = torch.zeros_like(rows), self._gradients.for_group(group)
        for width, (inputs, targets, shares) in zip(plan.sizes.max(0), self._minibatches(plan), strict=True):
            active = len(shares)
            if len(rows) > active:  # some clients have no examples left
                rows = rows[:active]
            of_all = (shares[:, :width] > 0) / counts[:active]
            total[:active] += gradients_of(rows, inputs[:, :width], targets[:, :width], of_all)[1]
        return total

    def _minibatches(self, plan: Plan) -> Iterator[Minibatches]:
        """Yield each step's minibatches of the clients that still train, gathered for several steps at a time.

        Clients with most examples come first.
        """
        sizes, starts = plan.sizes.T, plan.starts.T
        block_steps = max(1, GATHERED // (sizes.shape[1] * sizes.max() * self._input_elements))
        for first in range(0, len(sizes), block_steps):
            block = slice(first, first + block_steps)
            active = sizes[block] > 0
            widths = sizes[block][active][:, None]
            columns = np.arange(widths.max())
            real = columns < widths
            entries = starts[block][active][:, None] + np.where(real, columns, 0)  # padded with the first example
            shares = torch.from_numpy((real / widths).astype(np.float32)).to(self.device)
            parts = (*self._gather(plan, entries), shares)
            rows = active.sum(1).tolist()
            yield from zip(*(torch.split(part, rows) for part in parts), strict=True)

    def _gather(self, plan: Plan, entries: np.ndarray) -> tuple[Tensor, Tensor]:
        flat = entries.reshape(-1)
        rows = self.data.train[plan.examples[flat]]
        inputs = self.data.transform(rows.inputs, None if plan.choices is None else plan.choices[flat])
        inputs = inputs.contiguous()  # not channels last, in which vmap cannot normalise groups
        return (
            inputs.view(*entries.shape, *inputs.shape[1:]).to(self.device),
            rows.targets.view(*entries.shape, *rows.targets.shape[1:]).to(self.device),
        )

    def _losses(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of one client's examples."""
        return self._loss(self.model.at(weights, inputs), targets)


class StepStates:
    """The step state of all clients, those that have taken their last step included."""

    def __init__(self, initial: State, clients: int):
        self.all = {name: value.expand(clients, -1).clone() for name, value in initial.items()}

    def rows(self, count: int) -> State:
        """Return the step state of the first clients."""
        return {name: value[:count] for name, value in self.all.items()}

    def update(self, state: State) -> None:
        """Keep the step state of the first clients."""
        for name, value in state.items():
            self.all[name][: len(value)] = value


def _results(message: Message, state: ClientState, steps: np.ndarray, losses: Tensor) -> list[ClientResult]:
    return [
        ClientResult(
            client_row(message, row),
            {name: value.clone() for name, value in client_row(state, row).items()},  # a view keeps all rows alive
            count,
            loss,
        )
        for row, (count, loss) in enumerate(zip(steps.tolist(), losses.unbind(), strict=True))
    ]


def client_row(tensors: Message, row: int) -> Message:
    """Return one client's part; a tensor without rows, such as a received one passed on, belongs to every client."""
    return {name: value[row] if value.dim() == 2 else value for name, value in tensors.items()}


def stack_states(states: Sequence[ClientState]) -> ClientState:
    """Return client states as one with a row per client."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
