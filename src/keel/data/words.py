"""Sentences as sequences of word numbers, for models that predict the next word (as in Reddi et al., 2021).

With V words in the vocabulary: 0 is padding, 1 to V are the words, V + 1 is any other word, V + 2 marks the beginning
of a sentence and V + 3 its end.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from keel.core.examples import Examples
from keel.data.dataset import Dataset
from keel.data.store import Prepared
from keel.data.transforms import Tokens

Count = Annotated[int, Field(ge=1)]


def specials(words: int) -> tuple[int, int, int, int]:
    """Return the special tokens: padding, unknown word, beginning, end."""
    return 0, words + 1, words + 2, words + 3


def sequences(sentences: Iterable[Sequence[str]], numbers: Mapping[str, int], length: int) -> np.ndarray:
    """Encode sentences: one row each of the beginning, the first `length` words, and the end if it still fits."""
    padding, unknown, begin, end = specials(len(numbers))
    rows = []
    for words in sentences:
        row = [begin, *(numbers.get(word, unknown) for word in words[:length]), end, *[padding] * length]
        rows.append(row[: length + 1])
    smallest = np.int16 if len(numbers) + 4 < 2**15 else np.int32
    return np.array(rows, dtype=smallest).reshape(-1, length + 1)


def as_dataset(stored: Prepared, words: int) -> Dataset:
    """Make a data set of the prepared arrays "train" and "test" of sequences and the "keys" of their users."""
    arrays = stored.arrays
    return Dataset(
        _examples(arrays["train"]),
        _examples(arrays["test"]),
        words + 4,
        keys=arrays["keys"],
        test_keys=arrays.get("test_keys"),
        transform=Tokens(),
        specials=specials(words),
        sha256=stored.sha256,
    )


def _examples(rows: np.ndarray) -> Examples:
    """Predict the next word at every position: inputs and targets are two views of the same rows."""
    tensor = torch.from_numpy(rows)
    return Examples(tensor[:, :-1], tensor[:, 1:])
