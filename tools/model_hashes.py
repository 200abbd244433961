"""Prints the SHA-256 of the trained model for every algorithm and engine: equal before and after a refactoring.

    python tools/model_hashes.py > before.json      # in one checkout
    python tools/model_hashes.py before.json        # in another: prints what differs, exits with 1 if anything does

A trained model depends on the machine and on the versions of PyTorch and NumPy, so both have to run on the same ones.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import keel
from keel.algorithms import REGISTRY

ENGINES = ("serial", "cohort", "pool")
ROUNDS = 12


def batch_norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def specs() -> dict[str, tuple[dict, nn.Module | None]]:
    """The fixed list of specs, by a name for each."""
    listed: dict[str, tuple[dict, nn.Module | None]] = {}
    for name in REGISTRY:
        for engine in ENGINES:
            table = {"algorithm": {"name": name}, "rounds": ROUNDS, "engine": {"name": engine}}
            listed[f"{name} {engine}"] = table, None
            more = {"data": {"alpha": 0.5}, "local": {"batch": 4, "weight_decay": 0.01}, "evaluation": {"drift": True}}
            listed[f"{name} {engine} alpha 0.5"] = {**table, **more}, None
        for engine in ("serial", "pool"):
            table = {"algorithm": {"name": name}, "rounds": ROUNDS, "engine": {"name": engine}}
            local = {"model": {"buffers": "average"}, "local": {"drop_last": True, "batch": 7}}
            listed[f"{name} {engine} batch norm"] = {**table, **local}, batch_norm_net()
    for name in ("localghbm", "fedhbm"):
        table = {"algorithm": {"name": name, "tau_i": "expected"}, "rounds": 40, "engine": {"name": "serial"}}
        listed[f"{name} expected"] = table, None
    return listed


def hashes() -> dict[str, str]:
    found = {}
    with TemporaryDirectory() as folder:
        for number, (name, (table, module)) in enumerate(specs().items()):
            run = keel.run(table, model=module, out=Path(folder) / str(number))
            found[name] = run.summary["model_sha256"]
    return found


if __name__ == "__main__":
    now = hashes()
    if len(sys.argv) == 1:
        print(json.dumps(now, indent=2))
    else:
        before = json.loads(Path(sys.argv[1]).read_text())
        differing = [name for name in before if now.get(name) != before[name]]
        print(f"{len(before) - len(differing)} of {len(before)} models are equal to the bit")
        print("\n".join(f"differs: {name}" for name in differing), end="\n" if differing else "")
        sys.exit(bool(differing))
