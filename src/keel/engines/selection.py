"""Builds the engine of a run, and chooses one if the spec leaves it to `auto`.

`auto` chooses by the model, the algorithm and the device, never by measured time, so that equal specs choose equally.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from keel.core.engine import CPU, Engine, Workload
from keel.core.ram import available_ram
from keel.engines.batching import WORK_LIMIT, model_error, work_per_step_operation
from keel.engines.cohort import Cohort
from keel.engines.kinds import AUTO, ENGINES, FLOWER, user_factory
from keel.engines.pool import Pool, on_devices
from keel.engines.ray import Ray
from keel.engines.ray_cluster import Cluster
from keel.engines.serial import Serial
from keel.engines.stacking import stacking_error
from keel.errors import KeelError
from keel.settings import call_imported
from keel.units import size

log = logging.getLogger(__name__)

FORKS = sys.platform == "linux"
"""Whether a process that has loaded PyTorch can be forked."""
CPU_PARAMETERS = 1_000_000
"""Models with more parameters are not considered for batching: one client keeps a core busy."""
DEVICE_PARAMETERS = 5_000_000
"""The same for an accelerator, which one small model does not fill."""

TRIAL_MODELS = 20
"""The memory that the trial of batching takes, in models, as measured, rounded up. The smallest round takes as much."""


@dataclass(frozen=True)
class Choice:
    """The engine that `auto` chose, and why it is not `cohort`."""

    name: str
    reason: str = ""


def make_engine(name: str, workload: Workload, workers: int, cluster: Cluster | None = None) -> Engine:
    """Build the engine `name` with so many workers; on a cluster, so many actors.

    Raises:
        KeelError: There is no such engine, or it cannot run this workload.
    """
    choice = choose(workload) if name == AUTO else Choice(name)
    if name == Cohort.name:
        _check_cohort(workload)
    if workload.compile and choice.name != Cohort.name:
        because = f", because {choice.reason}" if choice.reason else ""
        raise KeelError(f"engine.compile requires engine.name = 'cohort' (got {choice.name!r}{because})")
    if cluster is None:
        engine = _make_named(choice.name, workload, workers)
    else:
        engine = _make_ray(choice.name, workload, workers, cluster)
    engine.reason = choice.reason
    return engine


def _make_named(name: str, workload: Workload, workers: int) -> Engine:
    if name in FACTORIES:
        return FACTORIES[name](workload, workers)
    engine = make_user_engine(name, user_factory(name), workload, workers)
    engine.name = name  # a resumed run finds it by this name
    return engine


def make_user_engine(name: str, factory: Callable[[Workload, int], Engine], workload: Workload, workers: int) -> Engine:
    """Build the engine of a user's factory.

    Raises:
        KeelError: The factory fails, or does not return an engine.
    """
    if not callable(factory):
        raise KeelError(f"engine must be a function of a workload and a number of workers (got {factory!r})")
    engine: Engine = call_imported("engine.name", name, factory, workload, workers)
    members = [member for member in (*Engine.__annotations__, *vars(Engine)) if not member.startswith("_")]
    if missing := sorted({member for member in members if not hasattr(engine, member)} - {"name", "reason"}):
        raise KeelError(
            f"engine.name: {name!r} must return a keel.core.engine.Engine (got {type(engine).__name__} without "
            f"{', '.join(missing)})"
        )
    return engine


def _make_ray(name: str, workload: Workload, workers: int, cluster: Cluster) -> Engine:
    if name not in ENGINES:
        raise KeelError(f"engine.address requires engine.name = 'ray', 'cohort' or 'auto' (got {name!r})")
    driver = workload.on(CPU)  # the driver may lack the device that its actors have
    engine = Cohort(driver) if name == Cohort.name else Serial(driver)
    if workload.device != CPU:
        engine.group = type(engine).group  # smaller groups are for the cores of a CPU
    return Ray(engine, workload, workers, cluster)


def choose(workload: Workload) -> Choice:
    """Return the engine that suits the model, the algorithm and the device.

    That is `cohort` if the model can be batched and batching is faster (see `batching.py`), otherwise `pool`, or
    `serial` where processes cannot be forked.
    """
    reason = _not_batched(workload)
    if reason is None:
        return Choice(Cohort.name)
    return Choice("pool" if FORKS and (workload.device == CPU or workload.devices) else "serial", reason)


def _not_batched(workload: Workload) -> str | None:
    """Return why clients are trained one at a time; None if they are batched."""
    task, on_cpu = workload.task, workload.device == CPU
    parameters, limit = sum(_sizes(task.module)), CPU_PARAMETERS if on_cpu else DEVICE_PARAMETERS
    if parameters > limit:
        return f"a model of {parameters:,} parameters is large enough to train one client at a time"
    if on_cpu and work_per_step_operation(task, workload.local) > WORK_LIMIT:
        return "the model's operations are large enough to train one client at a time"
    if (error := model_error(task, workload.local)) is not None:
        return error
    if (error := _algorithm_error(workload)) is not None:
        log.warning("%s; training one client at a time", error)
    return error


def _check_cohort(workload: Workload) -> None:
    """Raise a KeelError if `cohort` would fail, or give other results than `serial`."""
    needed, ram = TRIAL_MODELS * 4 * sum(_sizes(workload.task.module)), available_ram()
    if ram is not None and needed > ram:
        raise KeelError(
            f"engine.name = 'cohort' needs {size(needed)} of memory to batch clients of this model, but the machine "
            f"has only {size(ram)} of RAM; use 'serial' or a smaller model"
        )
    if error := model_error(workload.task, workload.local):
        raise KeelError(f"engine.name = 'cohort' cannot batch these clients: {error}; use 'pool' or 'serial'")
    if error := _algorithm_error(workload):
        raise KeelError(f"engine.name = 'cohort' cannot batch this algorithm: {error}; use 'pool' or 'serial'")


def _algorithm_error(workload: Workload) -> str | None:
    """Return why the algorithm cannot run on stacked clients; None if it can."""
    return stacking_error(workload.local.algorithm, _sizes(workload.task.module), workload.local.seed)


def _sizes(module: nn.Module) -> list[int]:
    """The number of elements of each trainable tensor."""
    return [p.numel() for p in module.parameters() if p.requires_grad]


def _make_serial(workload: Workload, workers: int) -> Engine:
    """Build `serial`. It is also what `ray` is without a cluster, for a run that is itself in a Ray worker."""
    return Serial(workload)


def _make_cohort(workload: Workload, workers: int) -> Engine:
    if FORKS and workers > 1 and workload.devices:
        return on_devices(Cohort, workload, workers)
    engine = Cohort(workload)
    return Pool(engine, workers) if FORKS and workers > 1 and workload.device == CPU else engine


def _make_pool(workload: Workload, workers: int) -> Engine:
    if workload.device != CPU and not workload.devices:
        raise KeelError(
            f"engine.name = 'pool' requires engine.device = 'cpu' or several GPUs (got {str(workload.device)!r}); "
            "use 'serial' or 'cohort'"
        )
    if not FORKS:
        raise KeelError("engine.name = 'pool' requires Linux, where processes fork; use 'serial' or 'cohort'")
    if workers > 1 and workload.devices:
        return on_devices(Serial, workload, workers)
    return Pool(Serial(workload), workers) if workers > 1 else Serial(workload)


def _not_in_a_spec(workload: Workload, workers: int) -> Engine:
    raise KeelError("engine.name = 'flower' cannot be set in a spec; start a federation with flwr run")


FACTORIES: dict[str, Callable[[Workload, int], Engine]] = {
    "serial": _make_serial,
    "cohort": _make_cohort,
    "pool": _make_pool,
    "ray": _make_serial,
    FLOWER: _not_in_a_spec,
}
"""Builds each engine of `RECORDED`."""
