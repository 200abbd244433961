"""The versions and task fingerprints that the result depends on in addition to the spec."""

import os
import platform
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from keel.config.schema import CUSTOM
from keel.core.adapted import own_loss
from keel.core.flat_model import state_fingerprint
from keel.core.loop import Loop
from keel.core.losses import DEFAULTS, LOSSES, OWN
from keel.core.optimizers import TorchOptimizer
from keel.core.records import Environment, Versions
from keel.core.sampling import Sampler
from keel.core.task import Task, default_loss
from keel.core.versions import source_sha256
from keel.runs.build import Training

SAME_BITS = ("keel", "source_sha256", "torch", "numpy")
"""The versions that have to be equal for two runs of a spec to be bit-identical."""


def versions() -> Versions:
    return {
        "keel": version("keel-fl"),
        "source_sha256": source_sha256(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }


def environment_of(training: Training) -> Environment:
    loop = training.loop
    return {
        **versions(),
        "engine": loop.engine.name,
        **_engine_reason(loop),  # type: ignore[typeddict-item]
        "device": str(training.device),
        "layout": loop.task.layout,
        "workers": training.workers,
        "processes": loop.engine.processes(loop.sampler.size),
        "bit_identical": loop.engine.bit_identical,
        "title": training.spec.algorithm.title,
        "algorithm_class": f"{type(loop.algorithm).__module__}:{type(loop.algorithm).__qualname__}",
        **({"metrics": CUSTOM} if loop.task.metrics and not training.spec.evaluation.metrics else {}),
        "metric": loop.task.primary.name,
        "maximize": loop.task.primary.maximize,
        **_sampler_text(training),
        **fingerprints(loop),
    }


def _engine_reason(loop: Loop) -> dict[str, str]:
    reason = getattr(loop.engine, "reason", "")  # a user's engine need not have one
    return {"engine_reason": reason} if reason else {}


def fingerprints(loop: Loop) -> dict[str, Any]:
    """Fingerprints that are equal if two runs have the same task, also where parts of it were passed in Python."""
    task, optimizer = loop.task, loop.local.optimizer
    return {
        "loss": _loss_name(task),
        "parameters": loop.parameters,
        "initial_sha256": state_fingerprint(task.module),
        "examples_sha256": task.data.fingerprint(),
        "partition_sha256": task.data.partition.fingerprint(),
        "cohorts_sha256": _cohorts_sha256(loop.sampler),
        **({"optimizer": optimizer.fingerprint} if isinstance(optimizer, TorchOptimizer) else {}),
    }


def _loss_name(task: Task) -> str:
    """The loss by its name; "custom" if it is the user's."""
    if task.loss is own_loss:
        return OWN
    if task.loss is default_loss(task.data):
        return "cross entropy" if task.data.classes else DEFAULTS[task.data.kind]
    names = [name for name, entry in LOSSES.items() if entry.make(task.data.specials) is task.loss]
    return names[0] if names else CUSTOM


def _cohorts_sha256(sampler: Sampler) -> str:
    """SHA-256 of the first cohorts, by which another sampler is recognised."""
    cohorts = [np.asarray(sampler.cohort(round)).tolist() for round in (1, 2, 3)]
    return sha256(f"{sampler.clients} {sampler.size} {sampler.period} {cohorts}".encode()).hexdigest()


def _sampler_text(training: Training) -> dict[str, str]:
    """Text that distinguishes two samplers passed in Python in a report, whatever their seeds."""
    if training.spec.participation.sampler != CUSTOM:
        return {}
    return {"sampler": sampler_text(training.loop.sampler)}


def sampler_text(sampler: Sampler) -> str:
    return f"{type(sampler).__name__}, {sampler.size} of {sampler.clients} clients"
