"""Seconds per round of FedAvg on the digits: a plain PyTorch loop, `serial` and `cohort`, measured in turns.

    make bench

The ratios are what counts; the seconds depend on the machine and its other work.
"""

from collections.abc import Callable
from copy import deepcopy
from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import cross_entropy

from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import make_task

ROUNDS, TURNS = 20, 5


def naive() -> Callable[[], None]:
    """What one would write by hand: a deep copy, an optimizer and a loop over the clients."""
    spec = make_spec({"algorithm": {"name": "fedavg"}})
    task = make_task(spec)
    module, training = task.module, Training(spec, task)

    def rounds() -> None:
        for t in range(1, ROUNDS + 1):
            copies = []
            for client in training.sampler.cohort(t):
                local, held = deepcopy(module), task.data.client(client)
                optimizer = torch.optim.SGD(local.parameters(), lr=spec.local.lr)
                for _ in range(spec.local.epochs or 1):
                    for batch in torch.randperm(len(held)).split(spec.local.batch):
                        optimizer.zero_grad()
                        cross_entropy(local(held.inputs[batch]), held.targets[batch]).backward()
                        optimizer.step()
                copies.append(local)
            with torch.no_grad():
                for p, *others in zip(module.parameters(), *(c.parameters() for c in copies), strict=True):
                    p.copy_(torch.stack(others).mean(0))

    return rounds


def keel(engine: str) -> Callable[[], None]:
    spec = make_spec(
        {
            "algorithm": {"name": "fedavg"},
            "rounds": ROUNDS,
            "engine": {"name": engine},
            "evaluation": {"every": ROUNDS, "last": 1},
        }
    )
    training = Training(spec, make_task(spec))
    return lambda: training.run(training.start(), []) and None


def main() -> None:
    torch.set_num_threads(1)
    contenders = {"plain PyTorch loop": naive(), "keel serial": keel("serial"), "keel cohort": keel("cohort")}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(TURNS + 1):  # the first turn warms up
        for name, play in contenders.items():
            began = perf_counter()
            play()
            if turn:
                times[name].append((perf_counter() - began) / ROUNDS)
    reference = median(times["plain PyTorch loop"])
    print(f"{'':20} {'ms a round':>12} {'of the plain loop':>18}")
    for name, seconds in times.items():
        print(f"{name:20} {1000 * median(seconds):12.2f} {median(seconds) / reference:18.2f}")


if __name__ == "__main__":
    main()
