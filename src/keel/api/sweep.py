"""keel.sweep: a search over fields of a spec, from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.algorithms import Algorithm
from keel.api.batch import check_workers, ended_by_ctrl_c, plain_values, shared_table
from keel.config.overrides import flatten, merge, read_spec
from keel.config.schema import Spec
from keel.core.flat_model import Loss
from keel.core.observers import Hook, Observer
from keel.core.optimizer_trial import MakeOptimizer
from keel.report.sweep import BestPoint, Sweep
from keel.runs.metrics import Metrics
from keel.runs.objects import DataSource, EngineFactory, ModelSource, RunObjects, SamplerSource
from keel.runs.passed import by_name, check_varied
from keel.runs.search_space import make_plan
from keel.runs.sweep import run_sweep


def sweep(
    over: Mapping[str, Any] | None = None,
    *,
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    algorithm: str | Algorithm | None = None,
    grid: str | None = None,
    search: str | None = None,
    points: int | None = None,
    seeds: int | Sequence[int] | None = None,
    on: str | None = None,
    optuna_sampler: str | None = None,
    pruner: str | None = None,
    model: ModelSource | None = None,
    data: DataSource | None = None,
    loss: Loss | str | None = None,
    metrics: Metrics | None = None,
    sampler: SamplerSource | None = None,
    engine: EngineFactory | None = None,
    optimizer: MakeOptimizer | str | None = None,
    hooks: Sequence[Observer | Hook] = (),
    out: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Sweep:
    """Search over fields of a spec for the best point, as the command `keel sweep` does.

    Runs are executed in parallel over the cores. The same call again continues an interrupted sweep; a call with more
    values, points or seeds and the same `out` runs only what is new. Objects reach the runs as in keel.compare.

    Args:
        over: The fields to search: a list of values, or a range such as {"low": 0.01, "high": 1.0, "log": True}.
        spec: What all runs share: a Spec, a table, or the path of a TOML file. It may have a [search] table.
        algorithm: The name of the algorithm, "module:Class", or an algorithm whose hyper-parameters are those that
            `over` does not search.
        grid: A named grid, as in "paper", instead of `over` or in addition to it.
        search: "grid" (default) tries every combination, "random" and "optuna" try `points` of them.
        points: The number of points for "random" and "optuna".
        seeds: The number of seeds per point (default: 1), starting from that of the spec, or a list of seeds.
        on: Select the best point on a "validation" split (default) or on the "test" examples.
        optuna_sampler: The sampler of Optuna: "tpe" (default), "random", "cmaes" or "gp".
        pruner: The pruner of Optuna: "median", "halving" or "hyperband" (default: none).
        model: A module whose current parameters are the initial ones of every run, or a function of the seed that
            returns a module.
        data: Federated data, as from keel.federate, or a function of the seed that returns them.
        loss: A name, or a function of outputs and targets that returns one loss per example or their mean (see
            keel.run).
        metrics: What is measured at each evaluation: names, torchmetrics objects or functions (see keel.run). The
            first is the primary metric, by which runs are compared.
        sampler: An object that samples the cohorts (see keel.core.sampling.Sampler), or a function of the seed that
            returns one.
        engine: A function of a keel.core.engine.Workload and a number of workers that returns the engine.
        optimizer: The optimiser of local steps: a name, or a class of torch.optim (see keel.run).
        hooks: keel.Observer instances, or functions hook(record, state, seconds); see keel.compare.
        out: The folder of the sweep (default: one below runs/ that depends on data, model and algorithm).
        workers: The number of processes; the default is one per core.
        progress: Show progress bars, or lines of text where standard error is not a terminal or a notebook.

    Returns:
        The sweep: `best` (None if no point finished), `rows`, `to_frame()`, `to_markdown()`, `to_latex()`.

    Raises:
        KeelError: An argument, the spec or the data are not valid; or `out` holds another search.
        KeyboardInterrupt: Ctrl-C; every run has finished its round and saved it.
    """
    passed = by_name(model, data, None, loss, metrics, sampler, engine, optimizer)
    objects = RunObjects(passed, hooks)
    check_workers(workers)
    options = {
        "method": search,
        "grid": grid,
        "points": points,
        "seeds": plain_values(seeds),
        "on": on,
        "sampler": optuna_sampler,
        "pruner": pruner,
        "fields": None if over is None else {field: plain_values(values) for field, values in over.items()},
    }
    given = {name: value for name, value in options.items() if value is not None}
    rest, searched = _without_search(spec)
    table = shared_table(rest, objects, algorithm if isinstance(algorithm, Algorithm) else None)
    if isinstance(algorithm, str):
        table = merge(table, {"algorithm": {"name": algorithm}})
    fixed = flatten(rest) if isinstance(spec, Mapping) and isinstance(rest, Mapping) else ()
    plan = make_plan({**table, "search": {**searched, **given}}, fixed)
    check_varied(plan.axes, passed)
    with ended_by_ctrl_c():
        ended = run_sweep(plan, None if out is None else Path(out), not progress, workers, objects)
    best = None
    if ended.best is not None:
        row = ended.rows[0]
        best = BestPoint(row["fields"], row["score"], plan.chosen(row["fields"]), ended.best)
    return Sweep(ended.path, ended.rows, best, plan.search.on, ended.primary)


def _without_search(
    spec: Spec | Mapping[str, Any] | str | Path | None,
) -> tuple[Spec | dict[str, Any], Mapping[str, Any]]:
    """The spec without its [search] table, and that table."""
    if isinstance(spec, Spec):
        return spec, {}
    table = read_spec(Path(spec)) if isinstance(spec, str | Path) else dict(spec or {})
    return table, table.pop("search", {})
