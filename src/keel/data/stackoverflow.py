"""Stack Overflow by user: sentences of questions and answers, from the HDF5 files of TensorFlow Federated (TFF)."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from keel.core.randomness import keyed_rng
from keel.data import words
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.data.fetch import Download
from keel.data.store import data_folder, prepared
from keel.data.words import Count
from keel.errors import KeelError

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
"""The number of test sentences: the first of randomly ordered users, out of 16.6 million written in 2018 or later."""

MAX_SENTENCES, MAX_BYTES = 2**22, 2**28
"""The most sentences of one user, and their bytes. A small file may declare more than the memory has."""


def stackoverflow(*, users: Count = 40_000, vocabulary: Count = 10_000, length: Count = 20) -> Dataset:
    """Next word of sentences on Stack Overflow; 342,477 users, of which `users` are drawn, the same for every seed."""
    train, test, counts = (data_folder() / name for download in DOWNLOADS for name in download.files)

    def make(folder: Path) -> dict[str, Any]:
        numbers = most_frequent(counts, vocabulary)
        rows, keys = [], []
        for user, sentences in read(train, users):
            rows.append(words.sequences(sentences, numbers, length))
            keys.append(np.full(len(sentences), user, dtype=np.int32))
        np.save(folder / "train.npy", np.concatenate(rows))
        np.save(folder / "keys.npy", np.concatenate(keys))
        test_sentences = islice((sentence for _, sentences in read(test) for sentence in sentences), TEST_SENTENCES)
        np.save(folder / "test.npy", words.sequences(test_sentences, numbers, length))
        return {}

    settings = {"users": users, "vocabulary": vocabulary, "length": length}
    return words.as_dataset(prepared("stackoverflow", [train, test, counts], settings, make), vocabulary)


ENTRY = CatalogEntry(stackoverflow, natural=True, downloads=DOWNLOADS)


def most_frequent(file: Path, vocabulary: int) -> dict[str, int]:
    """Number the first words of a file of "word count" lines, which is sorted by frequency, from 1."""
    try:
        with file.open(encoding="utf-8") as lines:
            frequent = [word for word, _count in map(str.split, islice(lines, vocabulary))]
    except (OSError, ValueError) as error:
        raise KeelError(f"data: {str(file)!r} is damaged or has no word counts ({error}); download it again") from error
    numbers = {word: number for number, word in enumerate(frequent, start=1)}
    if len(numbers) < vocabulary:
        raise KeelError(
            f"data.vocabulary must be at most {len(numbers)}, the number of words in {str(file)!r} (got {vocabulary})"
        )
    return numbers


def read(file: Path, users: int | None = None) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield users in a random order, the same for every seed: the number of each and the words of its sentences."""
    try:
        import h5py
    except ImportError:
        raise KeelError("data.name = 'stackoverflow' requires h5py: pip install 'keel-fl[text]'") from None
    try:
        with h5py.File(file) as opened:
            examples = _stored(opened, "examples")
            names = sorted(examples)
            if users is not None and users > len(names):
                raise KeelError(
                    f"data.users must be at most {len(names)}, the number of users in {str(file)!r} (got {users})"
                )
            for user in keyed_rng(0, "stackoverflow users").permutation(len(names))[:users]:
                # split at single blanks, as TFF does: two blanks have an empty word between them
                yield user, [tokens.decode().split(" ") for tokens in _sentences(examples, names[user]).tolist()]
    except KeelError:
        raise
    except (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise KeelError(
            f"data: {str(file)!r} is damaged or not TFF's Stack Overflow ({error}); download it again"
        ) from error


def _sentences(examples: Any, user: str) -> np.ndarray:
    """Return the sentences of a user, if they are in this file and not more than a user writes."""
    tokens = _stored(_stored(examples, user), "tokens")
    if tokens.external or tokens.is_virtual:
        raise ValueError("it refers to another file")
    if tokens.size is None or tokens.size > MAX_SENTENCES or tokens.nbytes > MAX_BYTES or tokens.ndim != 1:
        raise ValueError(f"the user {user!r} must have up to {MAX_SENTENCES:,} sentences (got shape {tokens.shape})")
    if _text_bytes(tokens) > MAX_BYTES:
        raise ValueError(f"the user {user!r} must have up to {MAX_BYTES:,} bytes of text")
    return tokens[()]


def _text_bytes(tokens: Any) -> int:
    """Return the total length that the file states for texts of variable length, which HDF5 allocates.

    It is 0 if the lengths are not stored as they are, but compressed.
    """
    lengths, offset = np.dtype({"names": ["length"], "formats": ["<u4"], "itemsize": 16}), tokens.id.get_offset()
    if offset is None or tokens.dtype != object or tokens.id.get_storage_size() != lengths.itemsize * tokens.size:
        return 0
    with Path(tokens.file.filename).open("rb") as file:
        file.seek(offset)
        stored = np.frombuffer(file.read(lengths.itemsize * tokens.size), lengths)
    return int(stored["length"].sum(dtype=np.int64))


def _stored(group: Any, name: str) -> Any:
    """Return a member of an HDF5 group that is no link: links may lead to other files."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{name!r} is a link")
    return group[name]
