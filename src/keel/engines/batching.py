"""Whether a group of clients can be trained as one batched program, and whether that is faster.

Both questions are answered before the first round, by counting and comparing, never by a clock, so that equal specs
choose equally on every machine.

Can it: the program of two clients with different weights and minibatches is recorded on some values and compared, on
other values, with each client alone. One minibatch is padded, so that a model or a loss that mixes the examples of a
minibatch is recognised too. Python's own state is watched, because a recorded program does not run Python.

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
from keel.core.program import Program
from keel.core.randomness import keyed_torch_rng
from keel.core.replay import LocalGradient, python_state, work_per_operation
from keel.core.task import Task, batched_loss
from keel.core.torch_adapter import has_hooks

WORK_LIMIT = 24_000
"""The largest work per operation for which batching pays on a CPU. For perceptrons, convolutional networks and
transformers of 32 sizes, a client in a group of eight took 0.06 to 0.5 of the processor time of a client alone up to
10,000, 0.4 to 0.7 up to 24,000, and 0.6 to 1 above it (benchmarks/batching.py)."""
SMALL_WORK = 4_000
"""Up to this work per operation a group of 32 clients is fastest; above it, smaller groups that share the cores."""
RTOL = {"float32": 1e-3, "bf16": 0.1}
"""The largest difference that counts as rounding, relative to a gradient's largest element."""


def model_error(task: Task, local: LocalTraining) -> str | None:
    """Return why the model or the loss cannot run on stacked clients; None if they can."""
    if task.moving:
        return f"training changes the buffer {task.moving[0]}"
    if has_hooks(task.module):
        return "the model has hooks"
    try:
        with single_thread(), keyed_torch_rng(local.seed, "batching"):
            return _compare(task, local)
    except Exception as error:  # the user's functions may raise anything
        lines = str(error).strip().splitlines()
        return f"the model or its loss fails on stacked clients ({lines[0] if lines else type(error).__name__})"


def work_per_step_operation(task: Task, local: LocalTraining) -> float:
    """Return the work of an average operation in a full local step, in elements written."""
    indices = task.data.partition[int(np.argmax(task.data.partition.sizes))][: local.config.batch]
    batch = task.data.train[indices]
    minibatch = Examples(task.data.transform(batch.inputs), batch.targets)
    model = FlatModel(task.module, task.moving, local.config.precision)
    return work_per_operation(model, local.loss, minibatch)


def _compare(task: Task, local: LocalTraining) -> str | None:
    precision = local.config.precision
    model, loss, rtol = FlatModel(task.module, precision=precision), batched_loss(local.loss), RTOL[precision]
    with python_state(model.module) as changed:
        program = Program(lambda w, x, y: loss(model.at(w, x), y), [*_clients(task, model, first=0)])
        weights, inputs, targets, shares = _clients(task, model, first=3)
        losses, gradients = program.bind(weights)(inputs, targets, shares)
        alone, same = LocalGradient(model, local.loss), True
        for row, count in enumerate((3, 2)):
            model.weights.copy_(weights[row])
            expected_loss, expected = alone(model.weights, inputs[row, :count], targets[row, :count])
            same &= torch.allclose(gradients[row], expected, rtol=0, atol=rtol * float(expected.abs().max()) + 1e-7)
            same &= torch.allclose(losses[row], expected_loss, rtol=rtol, atol=1e-6)
        if (reason := changed()) is not None:
            return reason
    return None if same else "stacked clients get other gradients than each alone, as if their examples interacted"


def _clients(task: Task, model: FlatModel, first: int) -> Iterator[Tensor]:
    """Yield weights, inputs, targets and shares of two clients with three and two examples."""
    rows = np.resize(task.data.partition.indices[first : first + 5], 6)
    examples: Examples = task.data.train[np.array(rows)]
    inputs = task.data.transform(examples.inputs).contiguous()
    yield model.weights + 0.05 * torch.randn(2, model.size)
    yield inputs.view(2, 3, *inputs.shape[1:])
    yield examples.targets.view(2, 3, *examples.targets.shape[1:])
    yield torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 2, 0]])
