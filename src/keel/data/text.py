"""The user's own texts, from JSON lines: who wrote what. Words and sentences are found by simple patterns."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np

from keel.data import words
from keel.data.federated import Pool
from keel.data.store import prepared
from keel.data.words import Count
from keel.errors import KeelError
from keel.settings import PathText

TEST_SHARE = 5
"""Without a test file, one in so many sentences of a user: the last ones."""

Sentences = dict[str, list[list[str]]]
"""Those of each user, as words."""

_BREAK = re.compile(r"[.!?]+(?=\s|$)|[\r\n]+")
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def text(*, file: PathText, test_file: PathText | None = None, vocabulary: Count = 10_000, length: Count = 20) -> Pool:
    """Next word of the user's own texts: JSON lines of {"user": ..., "text": ...}."""
    sources = [Path(name) for name in (file, test_file) if name is not None]
    for field, source in zip(("file", "test_file"), sources, strict=False):
        if not source.is_file():
            raise KeelError(f"data.{field}: no file {str(source)!r}")

    def make(place: Path) -> dict[str, Any]:
        train, test = held_out(read(sources[0])) if test_file is None else map(read, sources)
        if not test:
            raise KeelError(
                f"data: {file!r} has no user with {TEST_SHARE} sentences; accepted: data.test_file, or more text"
            )
        numbers = most_frequent((sentence for sentences in train.values() for sentence in sentences), vocabulary)
        users = {user: number for number, user in enumerate({**train, **test})}
        for part, held in ("train", train), ("test", test):
            together = [sentence for sentences in held.values() for sentence in sentences]
            np.save(place / f"{part}.npy", words.sequences(together, numbers, length))
        np.save(place / "keys.npy", keys(train, users))
        if train.keys() & test.keys():  # otherwise nobody trains who is tested
            np.save(place / "test_keys.npy", keys(test, users))
        return {"words": len(numbers)}

    settings = {"vocabulary": vocabulary, "length": length}
    stored = prepared("text", sources, settings, make)
    return words.pool(stored, stored.facts["words"])


def read(file: Path) -> Sentences:
    """Each user's sentences in the order of the file; those without a word are none."""
    found: Sentences = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                user, written = entry["user"], entry["text"]
            except (ValueError, KeyError, TypeError, RecursionError):
                user = written = None
            if not isinstance(user, str | int) or not isinstance(written, str):
                raise KeelError(
                    f"data: {str(file)!r} line {number} does not tell who wrote what; "
                    'accepted: {"user": "...", "text": "..."}'
                )
            if said := split(written):
                found.setdefault(str(user), []).extend(said)
    if not found:
        raise KeelError(f"data: {str(file)!r} has no words; accepted: some")
    return found


def split(written: str) -> list[list[str]]:
    """The words of each sentence, in lower case. A word is kept once in memory, however often it is used."""
    sentences = (_WORD.findall(sentence) for sentence in _BREAK.split(written.lower().replace("’", "'")))
    return [[intern(word) for word in sentence] for sentence in sentences if sentence]


def held_out(sentences: Sentences) -> tuple[Sentences, Sentences]:
    """The last sentences of each user, apart from the others; a user of few has none."""
    train, test = {}, {}
    for user, said in sentences.items():
        cut = len(said) - len(said) // TEST_SHARE
        train[user] = said[:cut]
        if said[cut:]:
            test[user] = said[cut:]
    return train, test


def most_frequent(sentences: Iterable[list[str]], vocabulary: int) -> dict[str, int]:
    """Words numbered from 1, the most frequent first, equally frequent ones by the alphabet."""
    counts = Counter(word for sentence in sentences for word in sentence)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[:vocabulary], start=1)}


def keys(held: Sentences, users: dict[str, int]) -> np.ndarray:
    """The number of the user of each sentence."""
    return np.repeat(np.array([users[user] for user in held], dtype=np.int32), [len(said) for said in held.values()])
