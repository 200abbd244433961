"""Checks of the input shape that a model requires."""

from keel.errors import KeelError


def image(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape as (channels, height, width)."""
    if len(shape) != 3:
        raise KeelError(
            f"model.name = {model!r} requires images of shape (channels, height, width) (got inputs of shape {shape})"
        )
    channels, height, width = shape
    return channels, height, width


def check_sequence(model: str, shape: tuple[int, ...]) -> None:
    """Raise a KeelError if the inputs are not sequences of tokens."""
    if len(shape) != 1:
        raise KeelError(f"model.name = {model!r} requires sequences of tokens (got inputs of shape {shape})")
