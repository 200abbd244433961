"""keel.compare: methods by seeds, from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.algorithms import Algorithm
from keel.api.batch import check_workers, ended_by_ctrl_c, plain_values, shared_table
from keel.config.schema import CUSTOM, Spec, algorithm_table
from keel.core.flat_model import Loss
from keel.core.observers import Hook, Observer
from keel.core.optimizer_trial import MakeOptimizer
from keel.errors import KeelError
from keel.report.comparison import Comparison
from keel.report.comparison import compare as compare_runs
from keel.runs.compare import Method, baseline_of, make_jobs, run_jobs
from keel.runs.metrics import Metrics
from keel.runs.objects import DataSource, EngineFactory, ModelSource, RunObjects, SamplerSource
from keel.runs.passed import by_name, check_varied


def compare(
    methods: str | Algorithm | Sequence[Method] | Mapping[str, Method],
    *,
    seeds: int | Sequence[int] = 5,
    spec: Spec | Mapping[str, Any] | str | Path | None = None,
    over: Mapping[str, Sequence[Any]] | None = None,
    same: Sequence[str] = (),
    model: ModelSource | None = None,
    data: DataSource | None = None,
    loss: Loss | str | None = None,
    metrics: Metrics | None = None,
    sampler: SamplerSource | None = None,
    engine: EngineFactory | None = None,
    optimizer: MakeOptimizer | str | None = None,
    hooks: Sequence[Observer | Hook] = (),
    out: str | Path = "runs/compare",
    workers: int | None = None,
    baseline: str | None = None,
    target: float | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare methods over seeds, as the command `keel compare` does: every method runs with every seed.

    Runs are executed in parallel over the cores. The same call again reuses the runs in `out` that have ended and
    resumes those that were interrupted. The code of a loss, a hook or an algorithm is not compared with that of
    earlier runs: use another `out` after a change.

    On Linux the worker processes are forked, so that models, data, losses, lambdas and local classes reach them as they
    are. Elsewhere, and with an accelerator, runs are executed one after the other in this process.

    Args:
        methods: Names of algorithms, "module:Class" texts, or algorithms with their hyper-parameters. A mapping gives
            them labels, as in {"short": GHBM(tau=5), "long": GHBM(tau=20)}.
        seeds: The number of seeds, starting from that of the spec, or a list of seeds.
        spec: What all runs share: a Spec, a table, or the path of a TOML file. Fields that it leaves out have defaults
            that may depend on the method.
        over: Other fields to vary, as in {"data.alpha": [0.0, 1.0]}: every method runs with every combination.
        same: Fields in which every method takes the value of the first method instead of its own default.
        model: A module whose current parameters are the initial ones of every run, or a function of the seed that
            returns a module. PyTorch's generator is seeded before the function is called.
        data: Federated data, as from keel.federate, or a function of the seed that returns them. With fixed data, the
            seed changes the minibatches and the cohorts only; a function of the seed can also change the partition.
        loss: A name, or a function of outputs and targets that returns one loss per example or their mean (see
            keel.run).
        metrics: What is measured at each evaluation: names, torchmetrics objects or functions (see keel.run). The
            first is the primary metric, by which runs are compared.
        sampler: An object that samples the cohorts (see keel.core.sampling.Sampler), or a function of the seed that
            returns one.
        engine: A function of a keel.core.engine.Workload and a number of workers that returns the engine.
        optimizer: The optimiser of local steps: a name, or a class of torch.optim (see keel.run).
        hooks: keel.Observer instances, or functions hook(record, state, seconds) that are called after each round.
            They are called in the process of the run, which may execute several runs: what they add to a record is
            kept, what they change elsewhere is not seen by this process.
        out: The folder of the run folders.
        workers: The number of processes; the default is one per core.
        baseline: The method with which the others are compared: its name or its label. The default is "fedavg".
        target: The target that rounds and bytes are counted to. The default is the final value of the baseline.
        progress: Show progress bars, or lines of text where standard error is not a terminal or a notebook.

    Returns:
        The comparison: `rows()`, `to_frame()`, `to_markdown()`, `to_latex()`, and curves and a table in a notebook. A
        method with a run that diverged has that status, and no final value.

    Raises:
        KeelError: An argument, the spec or the data are not valid; or `out` holds other runs.
        KeyboardInterrupt: Ctrl-C; every run has finished its round and saved it.
    """
    passed = by_name(model, data, None, loss, metrics, sampler, engine, optimizer)
    objects = RunObjects(passed, hooks)
    check_varied(over or {}, passed)
    check_workers(workers)
    table = _with_named_algorithm(shared_table(spec, objects))
    axes = {field: plain_values(values) for field, values in (over or {}).items()}
    jobs = make_jobs(table, _labelled(methods), plain_values(seeds), axes, Path(out), same)
    if baseline is not None:
        baseline = baseline_of(baseline, jobs, "baseline")
    with ended_by_ctrl_c():
        folders = run_jobs(jobs, not progress, workers, objects)
    return compare_runs(folders, baseline, target, require_evaluation=False)


def _with_named_algorithm(table: dict[str, Any]) -> dict[str, Any]:
    """The table with the settings of an algorithm that is an object, for the method of its name."""
    algorithm = table.get("algorithm")
    if not isinstance(algorithm, Algorithm):
        return table
    settings = algorithm_table(algorithm)
    return {**table, "algorithm": {} if settings["name"] == CUSTOM else settings}


def _labelled(methods: str | Algorithm | Sequence[Method] | Mapping[str, Method]) -> list[tuple[str | None, Method]]:
    """The methods with their labels."""
    pairs: list[tuple[Any, Any]]
    if isinstance(methods, str | Algorithm):
        pairs = [(None, methods)]
    elif isinstance(methods, Mapping):
        pairs = list(methods.items())
    else:
        pairs = [(None, method) for method in methods]
    if not pairs:
        raise KeelError("methods is empty; give names or algorithms, as in ['fedavg', 'ghbm']")
    for label, method in pairs:
        if not isinstance(label, str | None):
            raise KeelError(f"the labels of methods must be text (got {label!r})")
        if isinstance(method, type) and issubclass(method, Algorithm):
            raise KeelError(f"methods must hold names or algorithms; use {method.__name__}(...) instead of the class")
        if not isinstance(method, Method):
            raise KeelError(f"methods must hold names or algorithms (got {method!r})")
    return pairs
