"""Finds the loss of a run: by the kind of task, by a name, as "module:name", or a function that was passed."""

from keel import registry
from keel.core.adapted import own_loss
from keel.core.examples import FederatedData
from keel.core.flat_model import Loss
from keel.core.losses import DEFAULTS, LOSSES, OWN, check_loss, named_loss
from keel.errors import unknown_name


def find_loss(loss: Loss | str | None, data: FederatedData) -> Loss:
    """Return the loss.

    Args:
        loss: A function, a name, or None for the one that suits the targets. A model whose inputs include "labels"
            computes its loss itself, as Hugging Face's models do.

    Raises:
        KeelError: The name is not known, or the loss does not suit the task.
    """
    if loss is None:
        packing = data.train.packing
        if packing is not None and any(part.name == "labels" for part in packing.parts):
            return own_loss
        return named_loss(DEFAULTS[data.kind], data.kind, data.specials)
    if not isinstance(loss, str):
        check_loss(loss)
        return loss
    if loss == OWN:
        return own_loss
    if loss in LOSSES:
        return named_loss(loss, data.kind, data.specials)
    if ":" not in loss:
        raise unknown_name("local.loss", loss, [*LOSSES, OWN], "or module:name")
    found: Loss = registry.imported("local.loss", loss)
    if isinstance(found, type):
        found = found()
    check_loss(found)
    return found
