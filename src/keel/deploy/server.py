"""The server app of a federation: it starts or resumes a run whose clients are sites.

Sampling, aggregation, evaluation, run folder, checkpoints and resume are the same as in every other run.
"""

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save
from torch import nn

from keel.config.schema import Spec
from keel.core.flat_model import Loss
from keel.core.observers import Hook, Observer
from keel.core.records import PrimaryMetric, Record
from keel.core.training_state import TrainingState
from keel.deploy.audit import AuditLog
from keel.deploy.descriptions import Description
from keel.deploy.engine import FlowerEngine
from keel.deploy.federation_task import federation_task
from keel.deploy.flower_adapter import log, log_with_timestamps
from keel.deploy.invalid_reply import one_line
from keel.deploy.membership import (
    check_left,
    extend,
    find_training,
    member_sampler,
    membership_changes,
    record_membership,
    rescale_server_sum,
)
from keel.deploy.metrics_file import MetricsFile
from keel.deploy.reply_limit import announce_reply_size
from keel.deploy.settings import Federation, read_settings
from keel.deploy.site_data import Arrays, Model, initial_model, to_examples
from keel.deploy.sites import Sites
from keel.deploy.versions import installed_versions
from keel.deploy.watch import MEANINGS, SiteLosses, SiteWatch, idle_sites, many_examples, outliers
from keel.engines import Workload
from keel.errors import KeelError
from keel.privacy.noise import secret_noise
from keel.runs.build import Training, build
from keel.runs.execute import execute
from keel.runs.files import write_atomic
from keel.runs.folder import RunFolder
from keel.runs.progress import progress_of
from keel.runs.result import Run, ended_run
from keel.runs.run import create_folder
from keel.runs.same_task import check_same_task
from keel.units import size

MODEL_FILE = "model.safetensors"


def server_app(model: Model, *, test: Callable[[], Arrays] | None = None, loss: Loss | None = None) -> ServerApp:
    """Make the Flower app of the server.

    Args:
        model: Returns the untrained model.
        test: Returns (inputs, labels) to evaluate on at the server. Without it the sites evaluate on their examples.
        loss: A function of outputs and targets that returns one loss per example; cross entropy by default.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        spec, federation = read_settings(context.run_config)
        log_with_timestamps()
        announce = partial(announce_reply_size, context.run_id)
        run = run_federation(grid, spec, federation, model, test, loss, announce)
        if idle := run.summary.get("idle_sites"):  # Flower records the run as failed; the model is written
            texts = "; ".join(f"site {site}: {reason}" for site, reason in idle.items())
            raise KeelError(f"{run.status}, but not with all sites: {texts}")

    return app


def run_federation(
    grid: Grid,
    spec: Spec,
    federation: Federation,
    model: Model,
    test: Callable[[], Arrays] | None = None,
    loss: Loss | None = None,
    announce: Callable[[int], object] = lambda tensor_bytes: None,
) -> Run:
    """Train over the sites that `grid` reaches, into the folder `federation.out`. If it exists, resume the run.

    The audit log is next to the folder: it has a line for each start, site, drop, refusal and round.

    Args:
        announce: Called with the bytes of the tensors of the largest reply, before the sites are asked for it.
    """
    audit = audit_log(Path(federation.out))
    settings = {"spec": spec.to_toml(), "federation": federation.model_dump(mode="json")}
    audit.append("start", settings=_digest(spec, federation), **settings, **installed_versions())
    try:
        run = _run_federation(grid, spec, federation, model, test, loss, audit, announce)
    except BaseException as error:  # also when the operator stops the run
        audit.append("failed", error=type(error).__name__, reason=one_line(error))
        raise
    audit.append("end", status=run.status, rounds=run.summary["rounds"], model=run.summary["model_sha256"])
    return run


def _run_federation(
    grid: Grid,
    spec: Spec,
    federation: Federation,
    model: Model,
    test: Callable[[], Arrays] | None,
    loss: Loss | None,
    audit: AuditLog,
    announce: Callable[[int], object],
) -> Run:
    announce(0)  # a description has no tensors
    path = Path(federation.out)
    folder = find_training(spec, path, federation.members)
    module = initial_model(model, spec)
    training_id = uuid4().hex if folder is None else folder.environment["training"]
    recorded: list[Description] = [] if folder is None else folder.environment["sites"]
    check_left(federation.left_sites, recorded)
    request = {"spec": spec.to_toml(), "training": training_id, "study": federation.study}
    request["keel"] = installed_versions()["keel"]
    sites = Sites(grid, federation, request, recorded, audit.append)
    rounds = 0 if folder is None else len(folder.records())
    descriptions = [*recorded, *({**site, "joined": rounds} for site in sites.wait_for_new())]
    for site in many_examples(descriptions):
        log.warning("site %d: %s", site, MEANINGS["examples"])
        audit.append("outlier", site=site, value="examples")
        if federation.on_outlier == "stop" and site not in {description["site"] for description in recorded}:
            raise _stopped([f"site {site}: {MEANINGS['examples']}"])
    test_examples = None if test is None else to_examples(test(), "data.test_")
    task = federation_task(spec, module, descriptions, test_examples, loss, folder)

    def make_engine(workload: Workload, workers: int) -> FlowerEngine:
        engine = FlowerEngine(workload, spec, sites, test_examples is not None)
        announce(engine.reply_bytes)
        return engine

    training = build(
        spec,
        task,
        engine=make_engine,
        sampler=member_sampler(spec, descriptions, sites.members),
        secret=secret_noise,
    )
    if folder is not None and spec.privacy is not None and membership_changes(folder, descriptions, sites.members):
        raise KeelError(
            "federation.sites and federation.left must stay as they are with [privacy]: epsilon counts how often "
            "each of these sites takes part; use another federation.out"
        )
    if folder is None:
        folder = create_folder(training, path, {"training": training_id, "sites": descriptions})
    with folder.locked():
        folder.check_places()
        if not membership_changes(folder, descriptions, sites.members):
            check_same_task(folder, training.loop)  # before the run is changed
        extend(folder, spec)
        record_membership(folder, training, descriptions, sites.members)
        check_same_task(folder, training.loop)
        if folder.ended:
            return _return_ended(folder, training)
        loop, file = training.loop, folder.clients_file
        state = folder.restore(loop.client_states(file)) or loop.start(file)
        if state.round:
            log.info("resuming after round %d of %d: %s", state.round, spec.rounds, folder.path)
        rescale_server_sum(training, state, descriptions)
        watch = SiteWatch(folder.records(), federation.idle_rounds, audit.append)
        observers = [*_observers(folder, training, federation, sites, audit), watch]
        run = execute(
            folder, training, state, observers, lambda: federation.on_outlier == "stop" and bool(watch.outliers)
        )
        _add_site_report(folder, federation)
        if run.status == "interrupted":
            raise _stopped(watch.outliers)
    _write_model(folder, run.module)
    run = Run(folder.path, folder.summary, run.module)
    reason = f" ({run.summary['stop_reason']})" if run.status == "stopped" else ""
    log.info("%s after %d rounds%s: %s", run.status, run.summary["rounds"], reason, folder.path.absolute())
    return run


def _stopped(outliers: list[str]) -> KeelError:
    return KeelError(
        f"{'; '.join(outliers)}; federation.on_outlier stops the training: look at the site, then continue with the "
        "same flwr run, without the site (federation.left), or with it (federation.on_outlier = 'report')"
    )


def audit_log(run: Path) -> AuditLog:
    """Return the audit log of a run: next to its folder, so that it survives it."""
    return AuditLog(run.with_name(f"{run.name}.audit.jsonl"))


def _digest(spec: Spec, federation: Federation) -> str:
    """Return the SHA-256 of all settings of the app."""
    return sha256(f"{spec.to_toml()}\n{federation.model_dump_json()}".encode()).hexdigest()


def _observers(
    folder: RunFolder, training: Training, federation: Federation, sites: Sites, audit: AuditLog
) -> list[Observer | Hook]:
    """Return what records the rounds: per-site losses, the log, the audit log, the file for Prometheus."""
    spec, records = training.spec, folder.records()

    def audit_round(record: Record, state: TrainingState, seconds: float) -> None:
        values = ("norms", "losses", "cosines", "agreements", "clipped", "rejected")
        fields = ("cohort", *values, "bytes_down", "bytes_up", "dropped")
        audit.append(
            "round",
            round=record["round"],
            seconds=round(seconds, 3),
            **{name: value for name, value in record.items() if name in fields},
        )

    observers: list[Observer | Hook] = [
        SiteLosses(),
        _progress(spec, training.loop.task.primary),
        audit_round,
    ]
    if federation.metrics_file:
        file = folder.path / federation.metrics_file
        observers.append(MetricsFile(file, records, folder.seconds(), spec.rounds, sites.members))
    return observers


def _add_site_report(folder: RunFolder, federation: Federation) -> None:
    """Add the sites that contributed nothing and the outliers to the summary."""
    records, summary = folder.records(), folder.summary
    assert summary is not None
    summary["idle_sites"] = idle_sites(records, federation.idle_rounds)
    summary["outliers"] = outliers(records)
    for number in many_examples(folder.environment["sites"]):
        summary["outliers"].setdefault(str(number), {})["examples"] = []
    folder.finish(summary)
    for site, reason in summary["idle_sites"].items():
        log.warning("site %s: %s", site, reason)


def _return_ended(folder: RunFolder, training: Training) -> Run:
    run = ended_run(folder, training, folder.final_state())
    log.info("%s has ended already: %s", folder.path, run.status)
    if not (folder.path / MODEL_FILE).exists():  # the server was killed after the last round
        _write_model(folder, run.module)
    return run


def _progress(spec: Spec, primary: PrimaryMetric) -> Hook:
    """Return a hook that logs a line after each round."""

    def log_round(record: Record, state: TrainingState, seconds: float) -> None:
        value = progress_of(record, primary).get("value")
        dropped = record.get("dropped", {})
        parts = [
            f"round {record['round']} of {spec.rounds}: {len(record['cohort'])} sites",
            f"{len(dropped)} dropped" if dropped else "",
            "" if value is None else f"{primary.label} {primary.text(value)}{_evaluated_on(record)}",
            size(record["bytes_down"] + record["bytes_up"]),
            f"{seconds:.1f} s",
        ]
        log.info(", ".join(part for part in parts if part))

    return log_round


def _evaluated_on(record: Record) -> str:
    """Return how many examples are behind a value that the sites measured, and which sites are missing."""
    examples, missing = record.get("test_examples"), record.get("evaluation_missing")
    of = "" if examples is None else f" of {examples} test examples"
    return f"{of} without site {', '.join(map(str, missing))}" if missing else of


def _write_model(folder: RunFolder, module: nn.Module) -> None:
    """Write the trained model. To load it: `model.load_state_dict(safetensors.torch.load_file(path))`."""
    state = {name: value.detach().cpu().clone().contiguous() for name, value in module.state_dict().items()}
    write_atomic(folder.path / MODEL_FILE, [save(state)])
