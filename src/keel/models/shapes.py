"""What a model asks of the shape of an input, said in the user's words."""

from keel.errors import KeelError


def image(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape as (channels, height, width)."""
    if len(shape) != 3:
        raise KeelError(f"model: {model} needs images of (channels, height, width), not inputs of shape {shape}")
    channels, height, width = shape
    return channels, height, width


def expect_sequence(model: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise KeelError(f"model: {model} needs sequences of tokens, not inputs of shape {shape}")
