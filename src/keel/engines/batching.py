"""Whether a group of clients can be trained as one batched program, and whether that is faster.

Both questions are answered before the first round, by counting and comparing, never by a clock, so that equal specs
choose equally on every machine.

Can it: the program of four clients with different weights and minibatches is recorded on some values and compared, on
other values, with each client alone. Minibatches are padded as in training, so that a model or a loss that mixes the
examples of a minibatch is recognised too. The state of the model and the loss in Python is watched, because a recorded
program does not run Python; state in globals, or a clock, is not seen.

Is it faster: batching saves the overhead of single operations, so it pays where an operation does little.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from keel.core.client import LocalTraining
from keel.core.devices import single_thread
from keel.core.examples import Examples
from keel.core.flat_model import FlatModel
from keel.core.losses import batched_loss
from keel.core.program import Program
from keel.core.replay import LocalGradient, python_state, work_per_operation
from keel.core.stored_inputs import Items
from keel.core.task import Task
from keel.core.torch_adapter import has_hooks
from keel.core.torch_randomness import keyed_torch_rng

WORK_LIMIT = 24_000
"""The largest work per operation for which batching pays on a CPU. For perceptrons, convolutional networks and
transformers of 32 sizes, a client in a group of eight took 0.06 to 0.5 of the processor time of a client alone up to
10,000, 0.4 to 0.7 up to 24,000, and 0.6 to 1 above it (benchmarks/batching.py)."""
SMALL_WORK = 4_000
"""Up to this work per operation a group of 32 clients is fastest; above it, smaller groups that share the cores."""
RTOL = 1e-3
"""The largest difference that counts as rounding, relative to a gradient's largest element."""


def model_error(task: Task, local: LocalTraining) -> str | None:
    """Return why the model or the loss cannot run on stacked clients; None if they can."""
    if task.moving:
        return f"training changes the buffer {task.moving[0]}"
    if local.gradients is not None:
        return "privacy of single examples draws minibatches of random sizes"
    if has_hooks(task.module):
        return "the model has hooks"
    if task.data.train.variable:
        return "the length of the inputs differs from minibatch to minibatch"
    if isinstance(task.data.train.inputs, Items):
        return "the items of a data set are read client by client, so that random draws in them are reproducible"
    if not local.optimizer.elementwise:
        return "local.optimizer is not elementwise, so that clients would mix in it"
    if local.config.microbatch is not None and local.config.microbatch < local.config.batch:
        return "local.microbatch splits minibatches"
    try:
        with single_thread(), keyed_torch_rng(local.seed, "batching"):
            return _compare(task, local)
    except Exception as error:  # the user's functions may raise anything
        lines = str(error).strip().splitlines()
        if "random" in str(error):
            return "the model or its loss draws random numbers, as dropout does"
        return f"the model or its loss fails on stacked clients ({lines[0] if lines else type(error).__name__})"


def work_per_step_operation(task: Task, local: LocalTraining) -> float:
    """Return the work of an average operation in a full local step, in elements written."""
    model = FlatModel(task.module, task.moving, local.config.precision)
    return work_per_operation(model, local.loss, task.data.trial_minibatch(local.config.batch))


def _compare(task: Task, local: LocalTraining) -> str | None:
    """Return how stacked clients differ from each alone, in float32; None if they do not."""
    model, loss = FlatModel(task.module), batched_loss(local.loss)

    def losses_of(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(model.at(weights, inputs), targets)

    with python_state(model.module, local.loss) as changed:
        counts = _counts(task, local)
        program = Program.of_clients(losses_of, [*_clients(task, model, counts, first=0)])
        weights, inputs, targets, shares = _clients(task, model, counts, first=sum(counts))
        again = Program.of_clients(losses_of, [weights, inputs, targets, shares])
        losses, gradients = program.bind(weights)(inputs, targets, shares)
        alone, same = LocalGradient(model, local.loss), True
        for row, count in enumerate(counts):
            model.weights.copy_(weights[row])
            expected_loss, expected = alone(model.weights, inputs[row, :count], targets[row, :count])
            same &= torch.allclose(gradients[row], expected, rtol=0, atol=RTOL * float(expected.abs().max()) + 1e-7)
            same &= torch.allclose(losses[row], expected_loss, rtol=RTOL, atol=1e-6)
        if local.config.precision != "float32":
            half = FlatModel(task.module, precision=local.config.precision)
            Program.of_clients(lambda w, x, y: loss(half.at(w, x), y), [weights, inputs, targets, shares])
        if (reason := changed()) is not None:
            return reason
    if program.step_code != again.step_code:
        return "the operations of the forward pass change from call to call"
    if not same:
        return "stacked clients get other gradients than each alone, as if examples interacted or their number mattered"
    return None


def _counts(task: Task, local: LocalTraining) -> list[int]:
    """Return how many examples the compared clients have: a full minibatch, and fewer, which are padded to it."""
    full = max(8, min(local.config.batch, int(task.data.partition.sizes.max())))
    return [full, 2, 3, full // 2]


def _clients(task: Task, model: FlatModel, sizes: list[int], first: int) -> Iterator[Tensor]:
    """Yield weights, inputs, targets and shares of clients, whose minibatches are padded as `cohort` pads them."""
    indices = task.data.partition.indices
    rows = indices[np.arange(first, first + sum(sizes)) % len(indices)]
    starts = np.cumsum([0, *sizes[:-1]])[:, None]
    columns, counts = np.arange(max(sizes)), np.array(sizes)[:, None]
    real = columns < counts
    entries = starts + np.where(real, columns, 0)
    examples: Examples = task.data.train[rows[entries.reshape(-1)]]
    inputs = task.data.transform(examples.inputs).contiguous()
    yield model.weights + 0.05 * torch.randn(len(sizes), model.size)
    yield inputs.view(*entries.shape, *inputs.shape[1:])
    yield examples.targets.view(*entries.shape, *examples.targets.shape[1:])
    yield torch.from_numpy((real / counts).astype(np.float32))
