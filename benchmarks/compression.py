"""Measure the time of a round with compression relative to one without: LeNet on random images, engine `serial`.

    python benchmarks/compression.py [PAIRS]

Rounds with and without are alternated, so that the load of the machine affects both.
"""

import sys
from statistics import median
from time import process_time

import numpy as np
import torch

from keel.config.defaults import make_spec
from keel.core.examples import Examples, FederatedData, Partition
from keel.core.loop import Loop
from keel.runs.build import build, make_task

CODECS = ({"up": "top_k"}, {"up": "random_k"}, {"up": "int8", "down": "int8"}, {"up": "int4", "down": "int4"},
          {"up": "sign", "down": "int4"})  # fmt: skip
CLIENTS, EXAMPLES = 10, 500


def make_loop(compression: dict[str, str] | None) -> Loop:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.normal(size=(CLIENTS * EXAMPLES, 3, 32, 32)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 10, len(images)))
    parts = np.split(np.arange(len(images)), CLIENTS)
    examples = Examples(images, labels)
    data = FederatedData("random", examples, Examples(images[:10], labels[:10]), Partition.of(parts), 10)
    table = {"data": {"name": "custom"}, "model": {"name": "lenet"}, "algorithm": {"name": "fedavg"}}
    more = {"rounds": 10**6, "local": {"epochs": 1, "batch": 64}, "participation": {"rate": 0.2}}
    evaluation = {"evaluation": {"every": 10**9, "last": 1}, "engine": {"name": "serial"}}
    spec = make_spec({**table, **more, **evaluation, "compression": compression})
    return build(spec, make_task(spec, data=data)).loop


def main(pairs: int) -> None:
    without = make_loop(None)
    print(f"LeNet with {without.parameters:,} parameters, {EXAMPLES // 64 + 1} local steps of 64 examples, 2 clients")
    for codec in CODECS:
        ratios = []
        loops = (without, make_loop(codec))
        states = [loop.start() for loop in loops]
        for pair in range(pairs + 1):
            seconds = []
            for loop, state in zip(loops, states, strict=True):
                began = process_time()
                loop.run(state, stop=lambda: True)
                seconds.append(process_time() - began)
            if pair:  # the first round is a warm-up
                ratios.append(seconds[1] / seconds[0])
        print(f"{codec}: median ratio {median(ratios):.3f} of {pairs} pairs", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
