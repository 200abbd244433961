"""Momentum over 1/C rounds where AdamW trains the workers: the runs, the tables and the charts of docs/diloco.md.

    python tools/study_diloco.py plan                 list the runs: how many of each stage, and how many have ended
    python tools/study_diloco.py run [--minutes N]    run what is missing, until N minutes have passed
    python tools/study_diloco.py report               write results/diloco.json, the charts and the tables of the page

The runs are in runs/diloco. An interrupted study continues with the same command. KEEL_DATA must hold
Shakespeare's text.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import altair as alt

from keel.config.defaults import make_spec
from keel.config.fields import put_field
from keel.report.charts import COLOURS, DASHES
from keel.report.significance import half_width
from keel.runs.compare import run_jobs
from keel.runs.folder import RunFolder
from keel.runs.parallel import Job

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/diloco", ROOT / "results/diloco.json"
PAGE, IMAGES = ROOT / "docs/diloco.md", ROOT / "docs/images"
BATCH = 12
"""Runs between two looks at the clock."""

BASE: dict[str, Any] = {
    "rounds": 60,
    "data": {"name": "shakespeare_transformer:roles", "test_examples": 500},
    "model": {"name": "shakespeare_transformer:Transformer"},
    "local": {
        "steps": 10,
        "batch": 4,
        "optimizer": "adamw",
        "optimizer_state": "reset",
        "betas": [0.9, 0.99],
        "weight_decay": 0.1,
    },
    "evaluation": {"every": 10, "last": 3},
    "engine": {"name": "cohort"},
}
RATES, SEEDS, MORE_SEEDS, TUNING_SEED = (1.0, 0.5, 0.2, 0.1), (0, 1, 2), (3, 4), 100
INNER = (0.003, 0.01, 0.03)
SHARDS = {"role": {"data.partition": "key"}, "iid": {"data.partition": "iid", "data.clients": 20}}


@dataclass(frozen=True)
class Method:
    """An outer optimiser: its fields, and the field that is tuned together with the inner learning rate."""

    title: str
    fields: dict[str, Any]
    tuned: str
    values: tuple[float, ...]
    rates: tuple[float, ...] = RATES


METHODS = {
    "plain": Method("plain averaging", {"algorithm.name": "fedavg"}, "server.lr", (0.5, 0.75, 1.0, 1.25, 1.5)),
    "nesterov": Method("Nesterov", {"algorithm.name": "diloco"}, "server.lr", (0.1, 0.2, 0.3, 0.5, 0.7)),
    "ghbm": Method(
        "GHBM", {"algorithm.name": "ghbm", "algorithm.tau": "period"}, "algorithm.beta", (0.3, 0.45, 0.6, 0.75, 0.9)
    ),
    "fedhbm": Method(
        "FedHBM",
        {"algorithm.name": "fedhbm", "algorithm.tau_i": "actual"},
        "algorithm.beta",
        (0.3, 0.45, 0.6, 0.8, 1.0),
    ),
    # With C = 1 this is GHBM.
    "ghbm_1": Method(
        "GHBM, tau = 1",
        {"algorithm.name": "ghbm", "algorithm.tau": 1},
        "algorithm.beta",
        (0.3, 0.45, 0.6, 0.75, 0.9),
        RATES[1:],
    ),
}
Point = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One run of the study."""

    stage: str
    method: str
    shards: str
    rate: float
    seed: int
    point: Point = field(hash=False)
    """The tuned fields."""
    extra: Point = field(default_factory=dict, hash=False)

    @property
    def job(self) -> Job:
        fields = {**METHODS[self.method].fields, **SHARDS[self.shards], **self.point, **self.extra}
        table: dict[str, Any] = json.loads(json.dumps({**BASE, "seed": self.seed}))
        table["algorithm"] = {}
        for name, value in {**fields, "participation.rate": self.rate, "server.weighting": "uniform"}.items():
            put_field(table, name, value)
        if self.stage.startswith("tuning"):
            table["evaluation"] |= {"on": "validation", "every": BASE["rounds"]}
        values = "-".join(f"{name.split('.')[1]}{value:g}" for name, value in self.point.items())
        name = f"{self.method}-{self.shards}-C{self.rate:g}-{values}-seed{self.seed}"
        return Job(make_spec(table), RUNS / self.stage / name)

    @property
    def ended(self) -> bool:
        return (self.job.path / "summary.json").is_file()

    def result(self) -> Point:
        """The mean over the last evaluations, and the curve."""
        folder = RunFolder.open(self.job.path)
        records = [record for record in folder.records() if "test_loss" in record]
        last = records[-BASE["evaluation"]["last"] :]
        summary = json.loads((self.job.path / "summary.json").read_text())
        finished = summary["status"] == "finished"
        return {
            "stage": self.stage,
            "method": self.method,
            "shards": self.shards,
            "C": self.rate,
            "seed": self.seed,
            **self.point,
            **self.extra,
            "status": summary["status"],
            "loss": round(fmean(record["test_loss"] for record in last), 5) if finished else None,
            "accuracy": round(fmean(record["accuracy"] or 0 for record in last), 5) if finished else None,
            "curve": {record["round"]: round(record["test_loss"], 4) for record in records},
        }


def tuning() -> list[Trial]:
    """The grid of every method: the same number of trials each."""
    return [
        Trial("tuning", name, "role", 0.2, TUNING_SEED, {"local.lr": lr, method.tuned: value})
        for name, method in METHODS.items()
        for lr in INNER
        for value in method.values
    ]


def outer_tuning(chosen: dict[str, Point], rate: float) -> list[Trial]:
    """The outer grid of every method at another participation rate, at the inner learning rate that was chosen."""
    return [
        Trial("tuning_outer", name, "role", rate, TUNING_SEED, {**chosen[name], method.tuned: value})
        for name, method in METHODS.items()
        for value in method.values
    ]


def comparison(
    chosen: dict[str, Point], rate: float, shards: tuple[str, ...] = ("role", "iid"), seeds: tuple[int, ...] = SEEDS
) -> list[Trial]:
    return [
        Trial("comparison", name, sharding, rate, seed, chosen[name])
        for seed in seeds
        for sharding in shards
        for name, method in METHODS.items()
        if rate in method.rates
    ]


def ablations(many: dict[str, Point], few: dict[str, Point]) -> list[Trial]:
    alternatives = [
        ("nesterov", 0.2, {**many["nesterov"], "server.lr": 0.3}),
        ("ghbm", 0.1, {**few["ghbm"], "algorithm.beta": 0.6}),
        ("ghbm_1", 0.1, {**few["ghbm_1"], "algorithm.beta": 0.6}),
    ]
    trials = [
        Trial("alternative", name, shards, rate, seed, point)
        for name, rate, point in alternatives
        for shards in SHARDS
        for seed in SEEDS
    ]
    keep = {"local.optimizer_state": "keep"}
    trials += [
        Trial("keep", name, "role", 0.2, seed, many[name], keep)
        for name in ("plain", "nesterov", "ghbm", "fedhbm")
        for seed in SEEDS
    ]
    expected = {"algorithm.tau_i": "expected"}
    return trials + [
        Trial("expected", "fedhbm", "role", rate, seed, chosen["fedhbm"], expected)
        for rate, chosen in ((0.2, many), (0.1, few))
        for seed in SEEDS
    ]


def best(trials: list[Trial]) -> dict[str, Point]:
    """The point of each method with the lowest validation loss."""
    scores: dict[str, list[tuple[float, Trial]]] = {}
    for trial in trials:
        loss = trial.result()["loss"]
        scores.setdefault(trial.method, []).append((float("inf") if loss is None else loss, trial))
    return {name: min(of_method, key=lambda pair: pair[0])[1].point for name, of_method in scores.items()}


def stages() -> Iterator[tuple[str, list[Trial]]]:
    """The stages in order. A stage is known when those that select its settings have ended."""
    yield "tuning, C = 0.2", (grid := tuning())
    if not all(trial.ended for trial in grid):
        return
    many = best(grid)
    yield "comparison, C = 0.2", comparison(many, 0.2)
    yield "outer tuning, C = 0.1", (outer := outer_tuning(many, 0.1))
    if not all(trial.ended for trial in outer):
        return
    few = best(outer)
    yield "comparison, C = 0.1", comparison(few, 0.1)
    yield "comparison, C = 1, by role", comparison(many, 1.0, ("role",))
    yield "ablations", ablations(many, few)
    yield "more seeds, C = 0.1", comparison(few, 0.1, seeds=MORE_SEEDS)
    yield "more seeds, C = 0.2", comparison(many, 0.2, seeds=MORE_SEEDS)
    yield "comparison, C = 0.5, by role", comparison(many, 0.5, ("role",))
    yield "comparison, C = 0.5, IID", comparison(many, 0.5, ("iid",))
    yield "comparison, C = 1, IID", comparison(many, 1.0, ("iid",))


def plan() -> None:
    for name, trials in stages():
        print(f"{name}: {sum(trial.ended for trial in trials)} of {len(trials)} runs have ended")


def run(minutes: float, workers: int) -> None:
    end = time.monotonic() + 60 * minutes
    for name, trials in stages():
        left = [trial for trial in trials if not trial.ended]
        for first in range(0, len(left), BATCH):
            if time.monotonic() > end:
                print("out of time; the same command continues")
                return
            print(f"{time.strftime('%H:%M:%S')} {name}: {len(left) - first} of {len(trials)} runs left", flush=True)
            run_jobs([trial.job for trial in left[first : first + BATCH]], quiet=True, workers=workers)
    print("complete")


Row = dict[str, Any]
NAMES = {"role": "by role", "iid": "IID"}


def measured() -> list[Row]:
    return [trial.result() for _, trials in stages() for trial in trials if trial.ended]


def mean_text(values: list[float], digits: int = 3) -> str:
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}" if values else "not run"


def difference_text(differences: list[float]) -> str:
    """The mean of paired differences with its 95 % interval; bold if the interval excludes zero."""
    if len(differences) < 2:
        return "not run"
    mean, half = fmean(differences), half_width(differences)
    text = f"{mean:+.3f} ± {half:.3f}"
    return f"**{text}**" if abs(mean) > half else text


class Results:
    """The rows of all runs that have finished, by what they answer."""

    def __init__(self, rows: list[Row]):
        self.rows = [row for row in rows if row["loss"] is not None]

    def of(self, stage: str, method: str, shards: str, rate: float, column: str = "loss") -> dict[int, float]:
        """The values by seed."""
        wanted = {"stage": stage, "method": method, "shards": shards, "C": rate}
        return {row["seed"]: row[column] for row in self.rows if wanted.items() <= row.items()}

    def settings(self) -> Iterator[tuple[str, float]]:
        for shards in SHARDS:
            for rate in RATES:
                if self.of("comparison", "plain", shards, rate):
                    yield shards, rate

    def finals(self, column: str, digits: int) -> list[str]:
        lines = header(["shards", "C", *(method.title for method in METHODS.values())])
        for shards, rate in self.settings():
            cells = [
                mean_text([*self.of("comparison", name, shards, rate, column).values()], digits)
                if rate in method.rates
                else "= GHBM"
                for name, method in METHODS.items()
            ]
            lines.append(table_row([NAMES[shards], f"{rate:g}", *cells]))
        return lines

    def differences(self) -> list[str]:
        pairs = [
            ("nesterov", "plain"),
            ("ghbm", "plain"),
            ("fedhbm", "plain"),
            ("ghbm", "nesterov"),
            ("fedhbm", "nesterov"),
            ("ghbm", "ghbm_1"),
        ]
        titles = {name: "tau = 1" if name == "ghbm_1" else method.title for name, method in METHODS.items()}
        titles["plain"] = "plain"
        lines = header(["shards", "C", *(f"{titles[a]} - {titles[b]}" for a, b in pairs)])
        for shards, rate in self.settings():
            cells = [
                difference_text(self.paired(("comparison", a), ("comparison", b), shards, rate))
                if rate in METHODS[a].rates and rate in METHODS[b].rates
                else "0"
                for a, b in pairs
            ]
            lines.append(table_row([NAMES[shards], f"{rate:g}", *cells]))
        return lines

    def paired(self, a: tuple[str, str], b: tuple[str, str], shards: str, rate: float) -> list[float]:
        """The differences in loss between two methods, each with its stage, seed by seed."""
        first, second = (self.of(stage, method, shards, rate) for stage, method in (a, b))
        return [first[seed] - second[seed] for seed in first if seed in second]

    def grid(self, stage: str, column: str, title: str) -> list[str]:
        """The validation losses of a search: a row per tuned value; a method's lowest loss per search is bold."""
        rows = [row for row in self.rows if row["stage"] == stage]
        columns = sorted({row[column] for row in rows})
        lines = header(["method", "tuned", *(f"{title} {value:g}" for value in columns)])
        for name, method in METHODS.items():
            losses = {(row[method.tuned], row[column]): row["loss"] for row in rows if row["method"] == name}
            searches = [columns] if column == "local.lr" else [[value] for value in columns]
            lowest = {
                min((loss for (_, at), loss in losses.items() if at in search), default=0.0) for search in searches
            }
            for value in method.values:
                found = [losses.get((value, at)) for at in columns]
                texts = ["" if loss is None else f"{loss:.3f}" for loss in found]
                cells = [f"**{text}**" if loss in lowest else text for loss, text in zip(found, texts, strict=True)]
                lines.append(table_row([method.title, f"`{method.tuned} = {value:g}`", *cells]))
        return lines

    def ablations(self) -> list[str]:
        lines = header(["change", "method", "shards", "C", "loss without it", "loss with it", "difference"])
        changes = {"keep": "AdamW's state is kept", "expected": '`tau_i = "expected"`', "alternative": None}
        for (stage, change), (name, method), shards, rate in product(changes.items(), METHODS.items(), SHARDS, RATES):
            if values := self.of(stage, name, shards, rate):
                known = self.of("comparison", name, shards, rate)
                before = [known[seed] for seed in values if seed in known]
                paired = self.paired((stage, name), ("comparison", name), shards, rate)
                texts = mean_text(before), mean_text([*values.values()]), difference_text(paired)
                value = next(iter(self.of(stage, name, shards, rate, method.tuned).values()))
                title = change or f"`{method.tuned} = {value:g}`"
                lines.append(table_row([title, method.title, NAMES[shards], f"{rate:g}", *texts]))
        return lines


def header(cells: list[str]) -> list[str]:
    return [table_row(cells), "|" + "---|" * len(cells)]


def table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def draw_differences(results: Results, path: Path) -> None:
    """Draw the final losses less those of plain averaging with the same seed: the mean and every seed."""
    values = [
        {
            "method": METHODS[name].title,
            "shards": NAMES[shards],
            "C": f"{rate:g}",
            "difference": round(difference, 4),
            "mean": round(fmean(differences), 4),
        }
        for shards, rate in results.settings()
        for name in METHODS
        for differences in [results.paired(("comparison", name), ("comparison", "plain"), shards, rate)]
        for difference in differences
        if name != "plain"
    ]
    titles = [method.title for method in METHODS.values()]
    base = alt.Chart().encode(
        x=alt.X("C:N", title="participation rate C", sort=None, axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("method:N", sort=titles),
        color=alt.Color("method:N", title=None, scale=alt.Scale(domain=titles[1:], range=COLOURS[1 : len(titles)])),
    )
    title = "test loss less that of plain averaging (nats)"
    seeds = base.mark_point(size=28, filled=True, opacity=0.55).encode(y=alt.Y("difference:Q", title=title))
    means = base.mark_tick(thickness=2.5, size=11).encode(y=alt.Y("mean:Q"))
    chart = (
        alt.layer(seeds, means, data=alt.InlineData(values=values))
        .properties(width=320, height=260)
        .facet(column=alt.Column("shards:N", title=None, sort=[*NAMES.values()]))
        .configure_legend(orient="top", symbolSize=80)
    )
    chart.save(path)


def draw_curves(results: Results, path: Path) -> None:
    """Draw the test loss over rounds by role, averaged over the seeds, for the two smallest participation rates."""
    values = []
    for rate in RATES[-2:]:
        for name, method in METHODS.items():
            wanted = {"stage": "comparison", "method": name, "shards": "role", "C": rate}
            curves = [row["curve"] for row in results.rows if wanted.items() <= row.items()]
            rounds = [t for t in (curves[0] if curves else {}) if int(t) % BASE["evaluation"]["every"] == 0]
            values += [
                {"method": method.title, "C": f"C = {rate:g}", "round": int(t), "loss": fmean(c[t] for c in curves)}
                for t in rounds
            ]
    titles = [method.title for method in METHODS.values()]
    dashes = [DASHES[k % len(DASHES)] for k in range(len(titles))]
    chart = (
        alt.Chart(alt.InlineData(values=values))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("round:Q"),
            y=alt.Y("loss:Q", title="test loss (nats per character)", scale=alt.Scale(zero=False)),
            color=alt.Color("method:N", title=None, scale=alt.Scale(domain=titles, range=COLOURS[: len(titles)])),
            strokeDash=alt.StrokeDash("method:N", title=None, scale=alt.Scale(domain=titles, range=dashes)),
            column=alt.Column("C:N", title=None, sort="descending"),
        )
        .properties(width=300, height=240)
        .configure_legend(orient="top", symbolSize=400, symbolStrokeWidth=2.5)
    )
    chart.save(path)


def report() -> None:
    if RUNS.is_dir():
        rows = measured()
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    results = Results(json.loads(RESULTS.read_text()))
    draw_differences(results, IMAGES / "diloco_differences.svg")
    draw_curves(results, IMAGES / "diloco_curves.svg")
    tables = {
        "tuning": results.grid("tuning", "local.lr", "inner lr"),
        "outer": results.grid("tuning_outer", "C", "C ="),
        "loss": results.finals("loss", 3),
        "accuracy": results.finals("accuracy", 4),
        "differences": results.differences(),
        "ablations": results.ablations(),
    }
    text = PAGE.read_text() if PAGE.is_file() else "".join(f"<!-- {name} -->\n" for name in tables)
    for name, lines in tables.items():
        table = "\n".join([f"<!-- {name} -->", *lines]) + "\n"
        text = re.sub(rf"<!-- {name} -->\n(\|.*\n)*", lambda _, table=table: table, text)
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["plan", "run", "report"])
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    match arguments.command:
        case "plan":
            plan()
        case "run":
            run(arguments.minutes, arguments.workers)
        case "report":
            report()


if __name__ == "__main__":
    main()
