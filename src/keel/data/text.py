"""A user's texts from JSON lines, by author. Words and sentences are split by simple patterns."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np

from keel.data import words
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.data.store import prepared
from keel.data.words import Count
from keel.errors import KeelError
from keel.settings import PathText

TEST_SHARE = 5
"""Without a test file, the last 1/5 of each user's sentences are test sentences."""

Sentences = dict[str, list[list[str]]]
"""The sentences of each user, as lists of words."""

_BREAK = re.compile(r"[.!?]+(?=\s|$)|[\r\n]+")
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def text(
    *, file: PathText, test_file: PathText | None = None, vocabulary: Count = 10_000, length: Count = 20
) -> Dataset:
    """Next word of your texts: JSON lines of {"user": ..., "text": ...}."""
    sources = [Path(name) for name in (file, test_file) if name is not None]
    for field, source in zip(("file", "test_file"), sources, strict=False):
        if not source.is_file():
            raise KeelError(f"data.{field}: file {str(source)!r} does not exist")

    def make(folder: Path) -> dict[str, Any]:
        train, test = split_sentences(read(sources[0])) if test_file is None else map(read, sources)
        if not test:
            raise KeelError(
                f"data.file: {file!r} has no user with {TEST_SHARE} sentences to hold out a test sentence; "
                "use more text or set data.test_file"
            )
        numbers = most_frequent((sentence for sentences in train.values() for sentence in sentences), vocabulary)
        users = {user: number for number, user in enumerate({**train, **test})}
        for part, by_user in ("train", train), ("test", test):
            together = [sentence for sentences in by_user.values() for sentence in sentences]
            np.save(folder / f"{part}.npy", words.sequences(together, numbers, length))
        np.save(folder / "keys.npy", user_keys(train, users))
        if train.keys() & test.keys():  # otherwise the users of the test sentences do not train
            np.save(folder / "test_keys.npy", user_keys(test, users))
        return {"words": len(numbers)}

    settings = {"vocabulary": vocabulary, "length": length}
    stored = prepared("text", sources, settings, make)
    return words.as_dataset(stored, stored.facts["words"])


ENTRY = CatalogEntry(text, natural=True)


def read(file: Path) -> Sentences:
    """Read each user's sentences in the order of the file; a sentence without words is left out."""
    sentences: Sentences = {}
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    user, content = _entry(line, f"data: line {number} of {str(file)!r}")
                    if new := split(content):
                        sentences.setdefault(user, []).extend(new)
    except OSError as error:
        raise KeelError(f"data: {str(file)!r} cannot be read ({error.strerror})") from error
    if not sentences:
        raise KeelError(f"data: {str(file)!r} has no words; at least one sentence is required")
    return sentences


def _entry(line: bytes, where: str) -> tuple[str, str]:
    """Return the user and the text of a line."""
    try:
        entry = json.loads(line)
        user, content = entry["user"], entry["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        user = content = None
    if not isinstance(user, str | int) or not isinstance(content, str):
        raise KeelError(f'{where} must be {{"user": "...", "text": "..."}}')
    return str(user), content


def split(content: str) -> list[list[str]]:
    """Split a text into sentences of lower-case words. Equal words share one object in memory."""
    sentences = (_WORD.findall(sentence) for sentence in _BREAK.split(content.lower().replace("’", "'")))
    return [[intern(word) for word in sentence] for sentence in sentences if sentence]


def split_sentences(sentences: Sentences) -> tuple[Sentences, Sentences]:
    """Split each user's sentences into training and test; the last fifth are test, none for fewer than 5."""
    train, test = {}, {}
    for user, of_user in sentences.items():
        cut = len(of_user) - len(of_user) // TEST_SHARE
        train[user] = of_user[:cut]
        if of_user[cut:]:
            test[user] = of_user[cut:]
    return train, test


def most_frequent(sentences: Iterable[list[str]], vocabulary: int) -> dict[str, int]:
    """Number the most frequent words from 1, by frequency; equally frequent words in alphabetical order."""
    counts = Counter(word for sentence in sentences for word in sentence)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[:vocabulary], start=1)}


def user_keys(sentences: Sentences, users: dict[str, int]) -> np.ndarray:
    """Return the number of the user of each sentence."""
    lengths = [len(of_user) for of_user in sentences.values()]
    return np.repeat(np.array([users[user] for user in sentences], dtype=np.int32), lengths)
