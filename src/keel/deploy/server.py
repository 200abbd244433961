"""The server app of a federation: it starts or resumes a run whose clients are sites.

Sampling, aggregation, evaluation, run folder, checkpoints and resume are the same as in every other run.
"""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save
from torch import nn

from keel.config.schema import Spec
from keel.core.flat_model import Loss
from keel.core.observers import Hook
from keel.core.records import PrimaryMetric, Record
from keel.core.training_state import TrainingState
from keel.deploy.descriptions import Description
from keel.deploy.engine import FlowerEngine
from keel.deploy.federation_task import federation_task
from keel.deploy.flower_adapter import log
from keel.deploy.settings import Federation, read_settings
from keel.deploy.site_data import Arrays, Model, initial_model, to_examples
from keel.deploy.sites import Sites
from keel.runs.build import Training, build
from keel.runs.execute import execute
from keel.runs.files import write_atomic
from keel.runs.folder import RunFolder
from keel.runs.progress import progress_of
from keel.runs.result import Run, ended_run
from keel.runs.run import create_folder, find_run
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
        run_federation(grid, spec, federation, model, test, loss)

    return app


def run_federation(
    grid: Grid,
    spec: Spec,
    federation: Federation,
    model: Model,
    test: Callable[[], Arrays] | None = None,
    loss: Loss | None = None,
) -> Run:
    """Train over the sites that `grid` reaches, into the folder `federation.out`. If it exists, resume the run."""
    path = Path(federation.out)
    folder = find_run(spec, path)
    module = initial_model(model, spec)
    training_id = uuid4().hex if folder is None else folder.environment["training"]
    recorded: list[Description] = [] if folder is None else folder.environment["sites"]
    sites = Sites(
        grid, federation, {"spec": spec.to_toml(), "training": training_id, "study": federation.study}, recorded
    )
    descriptions = recorded or sites.wait_for_all()
    test_examples = None if test is None else to_examples(test(), "data.test_")
    task = federation_task(spec, module, descriptions, test_examples, loss)
    training = build(
        spec, task, engine=lambda workload, workers: FlowerEngine(workload, spec, sites, test_examples is not None)
    )
    if folder is None:
        folder = create_folder(training, path, {"training": training_id, "sites": descriptions})
    with folder.locked():
        check_same_task(folder, training.loop)
        if folder.ended:
            return _return_ended(folder, training)
        loop, file = training.loop, folder.clients_file
        state = folder.restore(loop.client_states(file)) or loop.start(file)
        if state.round:
            log.info("resuming after round %d of %d: %s", state.round, spec.rounds, folder.path)
        run = execute(folder, training, state, [_progress(spec, task.primary)])
    _write_model(folder, run.module)
    reason = f" ({run.summary['stop_reason']})" if run.status == "stopped" else ""
    log.info("%s after %d rounds%s: %s", run.status, run.summary["rounds"], reason, folder.path.absolute())
    return run


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
            "" if value is None else f"{primary.label} {primary.text(value)}",
            size(record["bytes_down"] + record["bytes_up"]),
            f"{seconds:.1f} s",
        ]
        log.info(", ".join(part for part in parts if part))

    return log_round


def _write_model(folder: RunFolder, module: nn.Module) -> None:
    """Write the trained model. To load it: `model.load_state_dict(safetensors.torch.load_file(path))`."""
    state = {name: value.detach().cpu().clone().contiguous() for name, value in module.state_dict().items()}
    write_atomic(folder.path / MODEL_FILE, [save(state)])
