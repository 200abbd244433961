"""The cost of privacy, robust means and compression: the time of a LeNet round with each, relative to one without.

    python benchmarks/mechanisms.py                          # all of them, three repetitions
    python benchmarks/mechanisms.py central example --repetitions 10

Random images in the shape of CIFAR-10, three clients with eight local steps of 64 images, engine `serial`. A repetition
runs one round of each, one after the other in this process, so that other load on the machine affects all of them. The
goal is at most 1.15. With `example`, a second table compares with Opacus: its DP-SGD and plain PyTorch take as many
steps on the same model and images.
"""

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from keel.config.defaults import make_spec
from keel.core.examples import Examples, FederatedData, Partition
from keel.core.loop import Loop
from keel.runs.build import build, make_task

CLIENTS, COHORT, EXAMPLES = 30, 3, 500
PRIVACY = {"clip": 0.5, "noise": 1.0, "delta": 1e-5}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "central": {"privacy": PRIVACY},
    "adaptive": {"privacy": {**PRIVACY, "quantile": 0.5, "bit_noise": 2.0}},
    "tree": {"privacy": {**PRIVACY, "mechanism": "tree"}},
    "local": {"privacy": {**PRIVACY, "mechanism": "local"}},
    "example": {"privacy": {**PRIVACY, "mechanism": "example"}},
    "median": {"server": {"mean": "median"}},
    "trimmed_mean": {"server": {"mean": "trimmed_mean"}},
    "geometric_median": {"server": {"mean": "geometric_median"}},
    "clip": {"server": {"clip": "adaptive"}},
    "top_k": {"compression": {"up": "top_k"}},
    "random_k": {"compression": {"up": "random_k"}},
    "int8": {"compression": {"up": "int8", "down": "int8"}},
    "int4": {"compression": {"up": "int4", "down": "int4"}},
    "sign": {"compression": {"up": "sign", "down": "int4"}},
}
TABLE = {
    "rounds": 10**6,
    "algorithm": {"name": "fedavg"},
    "data": {"name": "custom"},
    "model": {"name": "lenet"},
    "local": {"epochs": 1, "batch": 64, "lr": 0.01},
    "participation": {"rate": COHORT / CLIENTS, "sampler": "cyclic"},
    "evaluation": {"every": 10**9, "last": 1},
    "engine": {"name": "serial"},
}


def random_images() -> FederatedData:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.normal(size=(CLIENTS * EXAMPLES, 3, 32, 32)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 10, len(images)))
    parts = np.split(np.arange(len(images)), CLIENTS)
    examples = Examples(images, labels)
    return FederatedData("random", examples, Examples(images[:10], labels[:10]), Partition.of(parts), 10)


def seconds(loop: Loop, state: Any) -> tuple[float, float]:
    """The processor time and the wall-clock time of the next round."""
    return timed(partial(loop.run, state, stop=lambda: True))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    processor, wall = process_time(), perf_counter()
    work()
    return process_time() - processor, perf_counter() - wall


def torch_steps(opacus: str | None) -> Callable[[], None]:
    """The steps of a round in PyTorch: plain, or with DP-SGD in one of the modes of Opacus."""
    task = make_task(make_spec(TABLE), data=random_images())
    model, examples, criterion = task.module, task.data.train, torch.nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if opacus is not None:
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(examples.inputs, examples.targets), 64),
            criterion=criterion,
            noise_multiplier=PRIVACY["noise"],
            max_grad_norm=PRIVACY["clip"],
            poisson_sampling=False,
            grad_sample_mode=opacus,
        )
        model, optimizer, criterion = (*made[:2], made[2] if opacus == "ghost" else criterion)

    def steps() -> None:
        for step in range(COHORT * (EXAMPLES // 64 + 1)):
            rows = slice(64 * step, 64 * (step + 1))
            optimizer.zero_grad()
            criterion(model(examples.inputs[rows]), examples.targets[rows]).backward()
            optimizer.step()

    return steps


def main(cases: list[str], repetitions: int) -> None:
    task = make_task(make_spec(TABLE), data=random_images())
    loops = {case: build(make_spec({**TABLE, **CASES[case]}), task).loop for case in ["none", *cases]}
    states = {case: loop.start() for case, loop in loops.items()}
    print(f"LeNet with {loops['none'].parameters:,} parameters, {COHORT} clients, {EXAMPLES // 64 + 1} steps of 64")
    for case, loop in loops.items():
        seconds(loop, states[case])  # records programs and allocates memory
    ratios: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    for repetition in range(1, repetitions + 1):
        without = seconds(loops["none"], states["none"])
        for case in cases:
            times = seconds(loops[case], states[case])
            ratios[case].append((times[0] / without[0], times[1] / without[1]))
        print(f"repetition {repetition} of {repetitions}", flush=True)
    show(ratios)
    if "example" in cases:
        compare_with_opacus(loops["example"], states["example"], repetitions)


def compare_with_opacus(example: Loop, state: Any, repetitions: int) -> None:
    torch.set_num_threads(1)  # as Keel trains
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # Opacus needs no gradient of the images
    plain = torch_steps(None)
    private = {f"Opacus, {mode}": torch_steps(mode) for mode in ("hooks", "ghost")}
    private["Keel"] = partial(seconds, example, state)
    for steps in (plain, *private.values()):
        steps()
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in private}
    for _ in range(repetitions):
        without = timed(plain)
        for name, steps in private.items():
            times = timed(steps)
            ratios[name].append((times[0] / without[0], times[1] / without[1]))
    print("DP-SGD relative to plain steps of PyTorch")
    show(ratios)


def show(ratios: dict[str, list[tuple[float, float]]]) -> None:
    print("| | processor time | wall-clock time |\n|---|---|---|")
    for case, pairs in ratios.items():
        processor, wall = (sorted(kind) for kind in zip(*pairs, strict=True))
        print("|".join(["", f" `{case}` ", _with_range(processor), _with_range(wall), ""]))


def _with_range(ratios: list[float]) -> str:
    return f" {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) "


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*(case for case in CASES if case != "none"), []], metavar="CASE")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    main(options.cases or [case for case in CASES if case != "none"], options.repetitions)
