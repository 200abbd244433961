"""Accuracy against epsilon at alpha = 0, and poisoned clients against robust means.

    python tools/study_privacy.py epsilon     trains on MNIST (KEEL_DATA), writes results/privacy_epsilon.json
    python tools/study_privacy.py poisoning   trains on the digits, writes results/privacy_poisoning.json
    python tools/study_privacy.py noise       prints what momentum makes of noise on the mean, without any data
    python tools/study_privacy.py report      writes the tables of docs/privacy.md and the plot

An interrupted study continues: a run that the file has is not made again.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from keel.algorithms import Context, Report, algorithm_class
from keel.config.defaults import make_spec
from keel.core.client import ClientResult
from keel.core.engine import RoundWork
from keel.core.task import Task
from keel.report.charts import COLOURS
from keel.report.significance import half_width
from keel.runs.build import build, make_task

ROOT = Path(__file__).parents[1]
EPSILON, POISONING = ROOT / "results/privacy_epsilon.json", ROOT / "results/privacy_poisoning.json"
PAGE, PLOT = ROOT / "docs/privacy.md", ROOT / "docs/images/privacy_epsilon.svg"
BEGIN, END = "<!-- {} -->", "<!-- end -->"

ALGORITHMS = {"fedavg": "FedAvg", "fedavgm": "FedAvgM", "scaffold": "SCAFFOLD", "ghbm": "GHBM", "fedhbm": "FedHBM"}
EPSILONS = (1.0, 2.0, 4.0, 8.0, None)
TUNED = 2.0
CLIPS, RATES = (0.03, 0.1, 0.3, 1.0), (0.1, 0.4)
TUNING_SEED, SEEDS = 100, range(3)
CLIENTS, COHORT, ROUNDS, LAST, DELTA = 2000, 100, 60, 3, 1e-5

ATTACKS = ("none", "labels flipped", "negated", "times -10")
MEANS = ("mean", "clip", "median", "trimmed_mean", "geometric_median")
SITES = (
    (20, 4, "alpha = 0", (0.1, 0.3, 0.5), range(3)),
    (20, 4, "iid", (0.5,), range(3)),
    (3, 1, "iid", (0.5,), range(5)),
)
"""Clients, malicious clients, partition, the learning rates among which each mean is tuned, seeds."""


def epsilon_study() -> None:
    """Tune the clipping norm and the learning rate of each method at TUNED, then train with other seeds."""
    done = _read(EPSILON)
    for seed in (TUNING_SEED, *SEEDS):
        task: list[Task] = []
        for epsilon in (TUNED,) if seed == TUNING_SEED else EPSILONS:
            for algorithm in ALGORITHMS:
                points = [(clip, lr) for clip in CLIPS for lr in RATES]
                for clip, lr in points if seed == TUNING_SEED else [best_point(done, algorithm)]:
                    key = f"{algorithm} {epsilon} {clip:g} {lr:g} {seed}"
                    if key not in done:
                        done[key] = _train_private(task, algorithm, epsilon, clip, lr, seed)
                        print(key, done[key], flush=True)
                        _write(EPSILON, done)


def best_point(done: dict[str, float], algorithm: str) -> tuple[float, float]:
    """The clipping norm and the learning rate with the best accuracy on held-out examples."""
    tuned = {k: v for k, v in done.items() if k.startswith(f"{algorithm} ") and k.endswith(f" {TUNING_SEED}")}
    _, _, clip, lr, _ = max(tuned, key=lambda key: tuned[key]).split()
    return float(clip), float(lr)


def _train_private(made: list[Task], algorithm: str, epsilon: float | None, clip: float, lr: float, seed: int) -> float:
    privacy = {} if epsilon is None else {"privacy": {"clip": clip, "epsilon": epsilon, "delta": DELTA}}
    on = "validation" if seed == TUNING_SEED else "test"
    spec = make_spec(
        {
            "seed": seed,
            "rounds": ROUNDS,
            "algorithm": {"name": algorithm},
            "data": {"name": "mnist", "clients": CLIENTS, "alpha": 0.0},
            "model": {"name": "linear"},
            "local": {"epochs": 1, "batch": 15, "lr": lr, "weight_decay": 0.0},
            "server": {"weighting": "uniform"},
            "participation": {"rate": COHORT / CLIENTS, "sampler": "poisson"},
            "evaluation": {"every": ROUNDS, "last": LAST, "on": on},
            "engine": {"name": "cohort", "workers": 1},
            **privacy,
        }
    )
    if not made:
        made.append(make_task(spec))
    (task,) = made
    records = _run(spec, task)
    return round(fmean(record["accuracy"] for record in records if "accuracy" in record), 5)


def poisoning_study() -> None:
    """Tune the learning rate of each mean without an attack, then train with malicious clients and other seeds."""
    done = _read(POISONING)
    for clients, malicious, partition, rates, seeds in SITES:
        tuned = len(rates) > 1
        for seed in (TUNING_SEED, *seeds) if tuned else seeds:
            for attack in ATTACKS[:1] if seed == TUNING_SEED else ATTACKS:
                for mean in MEANS:
                    setting = f"{clients} | {partition} | {mean}"
                    for lr in rates if seed == TUNING_SEED else [best_rate(done, setting, rates)]:
                        key = f"{setting} | {attack} | {lr:g} | {seed}"
                        if key not in done:
                            done[key] = _train_poisoned(clients, malicious, partition, attack, mean, lr, seed)
                            print(key, done[key], flush=True)
                            _write(POISONING, done)


def best_rate(done: dict[str, float], setting: str, rates: Sequence[float]) -> float:
    """The learning rate of a mean with the best accuracy on held-out examples, without an attack."""
    if len(rates) == 1:
        return rates[0]
    return max(rates, key=lambda lr: done[f"{setting} | {ATTACKS[0]} | {lr:g} | {TUNING_SEED}"])


def _train_poisoned(
    clients: int, malicious: int, partition: str, attack: str, mean: str, lr: float, seed: int
) -> float:
    server = {} if mean == "mean" else {"clip": "adaptive"} if mean == "clip" else {"mean": mean}
    spec = make_spec(
        {
            "seed": seed,
            "rounds": 15 if clients == 3 else 40,
            "algorithm": {"name": "fedavg"},
            "data": {"clients": clients, **({"partition": "iid"} if partition == "iid" else {"alpha": 0.0})},
            "local": {"lr": lr},
            "server": {"weighting": "uniform", **server},
            "participation": {"rate": 1.0},
            "evaluation": {"every": 100, "last": 3, "on": "validation" if seed == TUNING_SEED else "test"},
            "engine": {"name": "cohort", "workers": 1},
        }
    )
    task = make_task(spec)
    bad = set(range(0, clients, clients // malicious)[:malicious])
    if attack == "labels flipped":
        targets = task.data.train.targets.clone()
        for client in bad:
            rows = torch.from_numpy(task.data.partition[client].astype("int64"))
            targets[rows] = task.data.classes - 1 - targets[rows]
        task = replace(task, data=replace(task.data, train=replace(task.data.train, targets=targets)))
    factor = {"negated": -1.0, "times -10": -10.0}.get(attack)
    records = _run(spec, task, set() if factor is None else bad, factor or 1.0)
    if records[-1].get("diverged"):
        return 0.0
    return round(fmean(record["accuracy"] for record in records if "accuracy" in record), 5)


def _run(spec: Any, task: Task, bad: set[int] = frozenset(), factor: float = 1.0) -> list[Any]:  # type: ignore[assignment]
    """The records of a run in which the reports of some clients are multiplied by a factor."""
    loop, records = build(spec, task).loop, []
    honest = loop.engine.train

    def train(work: RoundWork) -> Iterator[ClientResult]:
        for client, result in zip(work.cohort.tolist(), honest(work), strict=True):
            if client in bad:
                message = {name: factor * value for name, value in result.message.items()}
                result = replace(result, message=message)
            yield result

    if bad:
        loop.engine.train = train  # type: ignore[method-assign]
    loop.run(loop.start(), [lambda record, state, seconds: records.append(record)])
    return records


def noise_study() -> None:
    """Print what each algorithm makes of standard normal noise on the mean, and of a mean of one in each round."""
    for name in ("fedavg", "fedavgm", "ghbm"):
        generator = torch.Generator().manual_seed(0)
        noise = _models(name, lambda generator=generator: torch.randn(10_000, generator=generator))
        step, last = float((noise[-1] - noise[-2]).std()), float(noise[-1].std())
        signal = -float(_models(name, lambda: torch.ones(1))[-1])
        print(f"{name}: noise {step:.2f} in a round, {last:.1f} in the model after {ROUNDS}; signal {signal:.0f}")


def _models(name: str, mean: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """The models after each round, if the mean of the reports is `mean()` and the displacement of the local steps."""
    algorithm = algorithm_class(name)()
    server = algorithm.init_server(torch.zeros_like(mean()))
    models = [server["theta"]]
    for t in range(1, ROUNDS + 1):
        ctx = Context(t, CLIENTS, COHORT, COHORT / CLIENTS, CLIENTS / COHORT, lr=0.1, server_lr=1.0)
        received = algorithm.broadcast(server, ctx)
        moved = algorithm.displacement(models[-1], received, {}, ctx.for_client(1))
        report = Report({"delta": mean() - (0 if moved is None else moved)}, 1.0, 1)
        server = algorithm.aggregate(server, [report], ctx)
        models.append(server["theta"].clone())
    return models


def report() -> None:
    """Write the tables into the page, and the plot once all seeds have run."""
    page = PAGE.read_text(encoding="utf-8")
    done, poisoned = _read(EPSILON), _read(POISONING)
    epsilon = _epsilon_table(done)
    if all(len(values) == len(SEEDS) for _, _, values, _, _ in _epsilon_rows(done)):
        _plot(done)
        epsilon += ["", f"![Accuracy against epsilon](images/{PLOT.name})"]
    page = _with(page, "epsilon", epsilon)
    page = _with(page, "poisoning", _poisoning_table(poisoned))
    PAGE.write_text(page, encoding="utf-8")


def _epsilon_rows(done: dict[str, float]) -> Iterator[tuple[str, float | None, list[float], float, float]]:
    for algorithm in ALGORITHMS:
        for epsilon in EPSILONS:
            clip, lr = best_point(done, algorithm)
            keys = [f"{algorithm} {epsilon} {clip:g} {lr:g} {seed}" for seed in SEEDS]
            yield algorithm, epsilon, [100 * done[key] for key in keys if key in done], clip, lr


def _epsilon_table(done: dict[str, float]) -> list[str]:
    cells = {(algorithm, epsilon): values for algorithm, epsilon, values, _, _ in _epsilon_rows(done)}
    lines = [
        "| method | " + " | ".join("none" if e is None else f"epsilon = {e:g}" for e in EPSILONS) + " |",
        "|---" * (len(EPSILONS) + 1) + "|",
    ]
    for algorithm, title in ALGORITHMS.items():
        row = [_spread(cells[algorithm, e]) for e in EPSILONS]
        lines.append(f"| {title} | " + " | ".join(row) + " |")
    return lines


def _spread(values: list[float]) -> str:
    """The mean and its 95 % half-width over the seeds, or how many of them have run."""
    if len(values) == len(SEEDS):
        return f"{fmean(values):.1f} ± {half_width(values):.1f}"
    return f"{fmean(values):.1f} ({len(values)} of {len(SEEDS)} seeds)" if values else "not run"


def _poisoning_table(done: dict[str, float]) -> list[str]:
    titles = ["mean", '`clip = "adaptive"`', "median", "trimmed mean", "geometric median"]
    lines = ["| clients | data | attack | " + " | ".join(titles) + " |", "|---" * (3 + len(MEANS)) + "|"]
    for clients, malicious, partition, rates, seeds in SITES:
        for attack in ATTACKS:
            row = []
            for mean in MEANS:
                setting = f"{clients} | {partition} | {mean}"
                lr = best_rate(done, setting, rates)
                keys = [f"{setting} | {attack} | {lr:g} | {seed}" for seed in seeds]
                row.append(_range([100 * done[key] for key in keys if key in done], len(seeds)))
            label = partition if partition != "iid" else "IID"
            lines.append(f"| {malicious} of {clients} | {label} | {attack} | " + " | ".join(row) + " |")
    return lines


def _range(values: list[float], seeds: int) -> str:
    """The mean and the range over the seeds, and how many of them have run if some are missing."""
    if not values:
        return "not run"
    missing = "" if len(values) == seeds else f"; {len(values)} of {seeds} seeds"
    return f"{fmean(values):.1f} ({min(values):.1f} to {max(values):.1f}{missing})"


def _plot(done: dict[str, float]) -> None:
    """Draw the accuracy against epsilon, with 95 % intervals."""
    import altair as alt

    rows = []
    for algorithm, epsilon, values, _, _ in _epsilon_rows(done):
        if epsilon is not None:
            mean, spread = fmean(values), half_width(values)
            ends = {"low": mean - spread, "high": mean + spread}
            rows.append({"method": ALGORITHMS[algorithm], "epsilon": epsilon, "accuracy": mean, **ends})
    scale = alt.Scale(type="log", base=2, nice=False, padding=20)
    axis = {"title": "test accuracy, %", "scale": alt.Scale(zero=False)}
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("epsilon:Q", scale=scale, axis=alt.Axis(values=[1, 2, 4, 8]), title="epsilon (delta = 1e-5)"),
        color=alt.Color(
            "method:N", title=None, scale=alt.Scale(domain=[*ALGORITHMS.values()], range=COLOURS[: len(ALGORITHMS)])
        ),
    )
    lines = base.mark_line(point=True, strokeWidth=2).encode(y=alt.Y("accuracy:Q", **axis))
    intervals = base.mark_rule().encode(y=alt.Y("low:Q", **axis), y2="high:Q")
    alt.layer(lines, intervals).properties(width=480, height=260).save(str(PLOT))


def _with(page: str, name: str, lines: Sequence[str]) -> str:
    """The page with another content between two marks."""
    begin = BEGIN.format(name)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return "\n".join([before + begin, "", *lines, "", END + after])


def _read(file: Path) -> dict[str, float]:
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def _write(file: Path, content: dict[str, float]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    {"epsilon": epsilon_study, "poisoning": poisoning_study, "noise": noise_study, "report": report}[sys.argv[1]]()
