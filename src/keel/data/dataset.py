"""A data set before it is partitioned: what every loader returns."""

from dataclasses import dataclass, field

import numpy as np

from keel.core.examples import Examples, TaskKind
from keel.core.transforms import Identity, Transform
from keel.errors import KeelError


@dataclass(frozen=True)
class Dataset:
    """Training and test examples that are not yet assigned to clients.

    Args:
        train: Inputs and targets to train on, as they are stored.
        test: Inputs and targets to test on.
        classes: The number of classes; 0 if the targets are not class labels.
        keys: The client of each training example (a writer, a user, a hospital), if the data have natural clients.
        test_keys: The client of each test example, if the clients of the test examples also train.
        rows: The rows of `train` that are examples, if not all of them are: a window of a text that spans two speakers
            is not. `keys` then has one entry per element of `rows`.
        transform: Turns stored inputs into the model's inputs.
        specials: Targets that accuracy does not count. The first is padding, which the loss ignores too.
        task: The kind of task; by default classes are predicted, or numbers if `classes` is 0.
        sha256: A hash of the stored content, if it is known; otherwise it is computed from the arrays.
        class_names: The name of each class, if the classes have names.
    """

    train: Examples
    test: Examples
    classes: int
    keys: np.ndarray | None = None
    test_keys: np.ndarray | None = None
    rows: np.ndarray | None = None
    transform: Transform = field(default_factory=Identity)
    specials: tuple[int, ...] = ()
    sha256: str | None = None
    task: TaskKind | None = None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        examples = len(self.train if self.rows is None else self.rows)
        for name, keys, count in ("keys", self.keys, examples), ("test_keys", self.test_keys, len(self.test)):
            if keys is not None and keys.shape != (count,):
                raise KeelError(f"data.{name} must hold one key per example: shape ({count},) (got {keys.shape})")
            if keys is not None and (keys.dtype.kind in "Vc" or (keys.dtype.kind == "f" and np.isnan(keys).any())):
                raise KeelError(
                    f"data.{name} must be numbers or texts (got {keys.dtype}, with records, complex or NaN)"
                )
        if self.class_names and len(set(self.class_names)) != self.classes:
            raise KeelError(
                f"data.class_names must be {self.classes} different names, one per class (got {self.class_names!r})"
            )
