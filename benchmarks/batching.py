"""Measures when batching clients pays: the evidence for the limits in src/keel/engines/batching.py.

    python benchmarks/batching.py

For perceptrons, convolutional networks and transformers of 32 sizes, prints the work per operation, the processor time
of a local step of one client by autograd, and the time per client in groups of 5, 8 and 32 relative to it.
"""

import time
from collections.abc import Callable, Iterator

import torch
from classes import Transformer
from torch import Tensor, nn

from keel.core.examples import Examples
from keel.core.flat_model import FlatModel
from keel.core.losses import batched_loss, per_example_cross_entropy
from keel.core.program import Program
from keel.core.replay import LocalGradient, work_per_operation
from keel.engines.allocator import tune

GROUPS = (5, 8, 32)
CLASSES = 10
Case = tuple[str, nn.Module, Tensor]
"""A name, a model and a minibatch of inputs."""


def cases() -> Iterator[Case]:
    for inputs, widths, batches in ((64, (32, 64, 200, 400), (8, 32)), (784, (64, 200), (10, 64))):
        for width in widths:
            for batch in batches:
                module = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, CLASSES))
                yield f"MLP {inputs}-{width}, batch {batch}", module, torch.randn(batch, inputs)
    for one, two, side in ((4, 8, 8), (8, 16, 8), (16, 32, 8), (8, 16, 16), (4, 8, 28), (8, 16, 28)):
        for batch in (8, 32):
            first = [nn.Conv2d(1, one, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            second = [nn.Conv2d(one, two, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
            module = nn.Sequential(*first, *second, nn.Linear(two * (side // 4) ** 2, CLASSES))
            yield f"CNN {one}-{two} on {side}x{side}, batch {batch}", module, torch.randn(batch, 1, side, side)
    for width, length in ((16, 16), (32, 16), (32, 32), (64, 16)):
        for batch in (8, 16):
            module = Transformer(CLASSES, width, length=length)
            yield f"transformer {width}, {length} tokens, batch {batch}", module, torch.randint(0, 64, (batch, length))


def processor_time(step: Callable[[], object]) -> float:
    """The smallest processor time of a step in three repetitions of about 0.15 s."""
    step()
    began = time.process_time()
    step()
    count = max(1, int(0.15 / max(time.process_time() - began, 1e-6)))
    times = []
    for _ in range(3):
        began = time.process_time()
        for _ in range(count):
            step()
        times.append((time.process_time() - began) / count)
    return min(times)


def measure(module: nn.Module, inputs: Tensor) -> tuple[float, float, list[float]]:
    """The work per operation, the seconds of one client's step, and the relative time per client in each group."""
    model, targets = FlatModel(module), torch.randint(0, CLASSES, (len(inputs),))
    work = work_per_operation(model, per_example_cross_entropy, Examples(inputs, targets))
    alone = LocalGradient(model, per_example_cross_entropy)
    seconds = processor_time(lambda: model.weights.sub_(alone(model.weights, inputs, targets)[1], alpha=1e-4))
    loss, relative = batched_loss(per_example_cross_entropy), []
    for rows in GROUPS:
        weights = model.weights + 0.01 * torch.randn(rows, model.size)
        stacked = [
            torch.stack([part] * rows) for part in (inputs, targets, torch.full((len(inputs),), 1 / len(inputs)))
        ]
        bound = Program.of_clients(lambda w, x, y: loss(model.at(w, x), y), [weights, *stacked]).bind(weights)

        def step(weights: Tensor = weights, stacked: list[Tensor] = stacked, bound: Callable = bound) -> None:
            with torch.no_grad():
                weights.sub_(bound(*stacked)[1], alpha=1e-4)

        relative.append(processor_time(step) / rows / seconds)
    return work, seconds, relative


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tune()
    print(f"{'model':38} {'work':>8} {'ms':>7}  {'  '.join(f'of {rows:2}' for rows in GROUPS)}")
    measured = [(name, *measure(module, inputs)) for name, module, inputs in cases()]
    for name, work, seconds, relative in sorted(measured, key=lambda row: row[1]):
        print(f"{name:38} {work:8,.0f} {1000 * seconds:7.3f}  {'  '.join(f'{ratio:5.2f}' for ratio in relative)}")


if __name__ == "__main__":
    main()
