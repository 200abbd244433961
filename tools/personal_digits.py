"""Measure personal models on the digits: the table of docs/algorithms/fedper.md.

python tools/personal_digits.py
"""

from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import keel

METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FedAvg": ({"name": "fedavg"}, {}),
    "FedAvg and 10 steps of fine-tuning": ({"name": "fedavg"}, {"finetune_steps": 10}),
    "FedPer": ({"name": "fedper"}, {}),
    "Ditto, lambda = 0.1": ({"name": "ditto", "lambda_": 0.1}, {}),
    "Ditto, lambda = 1": ({"name": "ditto", "lambda_": 1.0}, {}),
    "each client alone (Ditto, lambda = 0)": ({"name": "ditto", "lambda_": 0.0}, {}),
}
SEEDS, LAST = 3, 20


def percent(values: list[float]) -> str:
    return f"{100 * fmean(values):.1f} ± {100 * stdev(values):.1f} %"


def main() -> None:
    print("| method | mean over clients | worst tenth |\n|---|---|---|")
    for label, (algorithm, evaluation) in METHODS.items():
        means, worst = [], []
        for seed in range(SEEDS):
            spec = {
                "seed": seed,
                "algorithm": algorithm,
                "rounds": 100,
                "data": {"clients": 50, "alpha": 0.5},
                "local": {"lr": 0.3},
                "server": {"lr": 1.0},
                "participation": {"rate": 0.2},
                "evaluation": {"every": 100, "last": LAST, "clients": 50, **evaluation},
            }
            with TemporaryDirectory() as folder:
                records = keel.run(spec, out=f"{folder}/run").records[-LAST:]
            means.append(fmean(record["clients"]["mean"] for record in records))
            worst.append(fmean(record["clients"]["worst_decile"] for record in records))
        print(f"| {label} | {percent(means)} | {percent(worst)} |", flush=True)


if __name__ == "__main__":
    main()
