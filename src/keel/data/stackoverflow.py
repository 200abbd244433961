"""Stack Overflow by user (TensorFlow Federated): sentences of questions and answers, from TFF's HDF5 files."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from keel.data import words
from keel.data.federated import Pool
from keel.data.fetch import Download
from keel.data.store import data_folder, prepared
from keel.data.words import Count
from keel.errors import KeelError
from keel.randomness import draws

_TFF = "https://storage.googleapis.com/tff-datasets-public"
DOWNLOADS = (
    Download(
        f"{_TFF}/stackoverflow.tar.bz2",
        "sha256:99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
        "stackoverflow/stackoverflow.tar.bz2",
        ("stackoverflow_train.h5", "stackoverflow_test.h5"),
    ),
    Download(
        f"{_TFF}/stackoverflow.word_count.tar.bz2",
        "sha256:1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
        "stackoverflow/stackoverflow.word_count.tar.bz2",
        ("stackoverflow.word_count",),
    ),
)
TEST_SENTENCES = 100_000
"""Of the 16.6 million written from 2018 on, after those of training: of users by the same kind of draw."""


def stackoverflow(*, users: Count = 40_000, vocabulary: Count = 10_000, length: Count = 20) -> Pool:
    """Next word of sentences on Stack Overflow; 342,477 users, of which `users` are drawn, whatever the seed."""
    train, test, counts = (data_folder() / name for download in DOWNLOADS for name in download.files)

    def make(place: Path) -> dict[str, Any]:
        numbers = most_frequent(counts, vocabulary)
        rows, keys = [], []
        for user, sentences in read(train, users):
            rows.append(words.sequences(sentences, numbers, length))
            keys.append(np.full(len(sentences), user, dtype=np.int32))
        np.save(place / "train.npy", np.concatenate(rows))
        np.save(place / "keys.npy", np.concatenate(keys))
        tested = islice((sentence for _, sentences in read(test) for sentence in sentences), TEST_SENTENCES)
        np.save(place / "test.npy", words.sequences(tested, numbers, length))
        return {}

    settings = {"users": users, "vocabulary": vocabulary, "length": length}
    return words.pool(prepared("stackoverflow", [train, test, counts], settings, make), vocabulary)


def most_frequent(file: Path, vocabulary: int) -> dict[str, int]:
    """The first words of a file of "word count" lines, which has the most frequent first."""
    try:
        with file.open(encoding="utf-8") as lines:
            found = [word for word, _count in map(str.split, islice(lines, vocabulary))]
    except ValueError as error:
        raise KeelError(f"data: {str(file)!r} is damaged or no word counts ({error})") from error
    numbers = {word: number for number, word in enumerate(found, start=1)}
    if len(numbers) < vocabulary:
        raise KeelError(f"data.vocabulary: {vocabulary}, but {str(file)!r} has {len(numbers)} words; accepted: fewer")
    return numbers


def read(file: Path, users: int | None = None) -> Iterator[tuple[int, list[list[str]]]]:
    """Users in a drawn order that is the same for every seed, each by number with the words of its sentences."""
    try:
        import h5py
    except ImportError:
        raise KeelError("data.name: 'stackoverflow' needs h5py; accepted: pip install 'keel-fl[text]'") from None
    try:
        with h5py.File(file) as opened:
            examples = opened["examples"]
            names = sorted(examples)
            if users is not None and users > len(names):
                raise KeelError(f"data.users: {users}, but {str(file)!r} has {len(names)}; accepted: 1 to {len(names)}")
            for user in draws(0, "stackoverflow users").permutation(len(names))[:users]:
                # one blank between words, whatever they are: TFF splits the same way
                yield user, [tokens.decode().split(" ") for tokens in examples[names[user]]["tokens"][()].tolist()]
    except KeelError:
        raise
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise KeelError(f"data: {str(file)!r} is damaged or not TFF's Stack Overflow ({error})") from error
