"""Sentences as rows of numbers, for models that predict the next word (as Reddi et al., 2021, prepare them).

0 is padding, 1 to V are the words, V+1 is any other word, V+2 begins a sentence and V+3 ends it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from keel.data.federated import Examples, Pool
from keel.data.preparation import Tokens
from keel.data.store import Prepared

Count = Annotated[int, Field(ge=1)]


def specials(words: int) -> tuple[int, int, int, int]:
    """Padding, another word, beginning, end."""
    return 0, words + 1, words + 2, words + 3


def sequences(sentences: Iterable[Sequence[str]], numbers: Mapping[str, int], length: int) -> np.ndarray:
    """A row for each sentence: its beginning and the first `length` words; its end only if there is room."""
    padding, other, begin, end = specials(len(numbers))
    rows = []
    for words in sentences:
        row = [begin, *(numbers.get(word, other) for word in words[:length]), end, *[padding] * length]
        rows.append(row[: length + 1])
    smallest = np.int16 if len(numbers) + 4 < 2**15 else np.int32
    return np.array(rows, dtype=smallest).reshape(-1, length + 1)


def pool(stored: Prepared, words: int) -> Pool:
    """The arrays "train" and "test" of sequences, with the keys of their users."""
    arrays = stored.arrays
    return Pool(
        _examples(arrays["train"]),
        _examples(arrays["test"]),
        words + 4,
        keys=arrays["keys"],
        test_keys=arrays.get("test_keys"),
        prepare=Tokens(),
        specials=specials(words),
        sha256=stored.sha256,
    )


def _examples(rows: np.ndarray) -> Examples:
    """At each place the word there is the input and the next the target: two views of the same row."""
    tensor = torch.from_numpy(rows)
    return Examples(tensor[:, :-1], tensor[:, 1:])
