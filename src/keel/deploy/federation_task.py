"""The server's task: it has the model and the sites' descriptions, but no training examples."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from keel.config.schema import Spec
from keel.core.examples import Examples, Partition, RemoteData
from keel.core.flat_model import Loss, state_fingerprint
from keel.core.task import Task
from keel.deploy.descriptions import Description
from keel.errors import KeelError
from keel.runs.build import make_task
from keel.runs.folder import RunFolder


def federation_task(
    spec: Spec,
    module: nn.Module,
    descriptions: list[Description],
    test: Examples | None,
    loss: Loss | None,
    resumed: RunFolder | None = None,
) -> Task:
    """Make the task from the sites' descriptions, after checking that they agree with each other and with the model.

    Args:
        resumed: The run that is resumed, whose sites have joined with the model that it started with.
    """
    first = descriptions[0]
    for site in descriptions:
        for name in "shape", "target_shape", "classes", "moving":
            if site[name] != first[name]:
                raise KeelError(
                    f"{name} must be the same at every site (got {site[name]} at site {site['site']} "
                    f"and {first[name]} at site {first['site']})"
                )
    placeholder = Examples(torch.zeros(1, *first["shape"]), torch.zeros(1, *first["target_shape"], dtype=torch.long))
    partition = Partition(np.zeros(1), np.cumsum([0, *(site["examples"] for site in descriptions)]))
    data = RemoteData("federation", placeholder, test or placeholder, partition, first["classes"])
    task = make_task(spec, module=module, data=data, loss=loss)
    checksum = state_fingerprint(task.module)
    if resumed is not None and resumed.environment["initial_sha256"] != checksum:
        raise KeelError(_changed_model(resumed, task.module))
    if unknown := set(first["moving"]) - set(dict(task.module.named_buffers())):
        raise KeelError(
            f"site {first['site']} reports running buffers that the server's model does not have: "
            f"{', '.join(sorted(unknown))}; model() must return the same model on every machine"
        )
    for site in descriptions:
        if site["model"] != checksum:
            raise KeelError(
                f"site {site['site']}: the initial model has checksum {site['model'][:12]}, but the server's has "
                f"{checksum[:12]}; model() must return the same model on every machine"
            )
    return replace(task, moving=tuple(first["moving"]))


def _changed_model(run: RunFolder, module: nn.Module) -> str:
    then = run.environment["parameters"]
    now = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    difference = f"{then:,} parameters then, {now:,} now" if then != now else "other initial weights"
    return (
        f"federation.out = {str(run.path)!r} has a run of another model ({difference}); restore the model to continue "
        "that run, or set federation.out to a new folder"
    )
