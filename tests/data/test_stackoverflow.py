import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel import KeelError
from keel.core.losses import per_sequence_cross_entropy
from keel.data import catalog, stackoverflow
from keel.data.partition import partition_dataset
from keel.data.words import sequences, specials

h5py = pytest.importorskip("h5py")

WORDS = ["the", "to", "i", "a", "how", "code", "<URL>"]
SETTINGS: dict[str, Any] = {"users": 3, "vocabulary": 5, "length": 4}
USERS = {
    "00000001": ["how to code", "i code the code a lot"],
    "00000012": ["the"],
    "00000123": ["", "a  b", "the to i a"],
}


def vlen(texts: list[str]) -> dict[str, Any]:
    return {"data": texts, "dtype": h5py.string_dtype()}


def fixed(texts: list[str]) -> dict[str, Any]:
    return {"data": np.array([text.encode() for text in texts], dtype="S40")}


def write(file: Path, users: dict[str, list[str]], stored: Callable[[list[str]], dict[str, Any]] = vlen) -> None:
    """Write users in TFF's format: examples/USER/FIELD."""
    with h5py.File(file, "w") as opened:
        for user, texts in users.items():
            group = opened.create_group(f"examples/{user}")
            group.create_dataset("tokens", **stored(texts))
            group.create_dataset("title", **stored(["how ?"] * len(texts)))
            group.create_dataset("score", data=np.ones(len(texts), dtype=np.int64))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    folder = tmp_path / "stackoverflow"
    folder.mkdir()
    write(folder / "stackoverflow_train.h5", USERS)
    write(folder / "stackoverflow_test.h5", {"00000002": ["to the", "how"], "00000012": ["i i i"]})
    counts = "".join(f"{word} {100 - place}\n" for place, word in enumerate(WORDS))
    (folder / "stackoverflow.word_count").write_text(counts)
    return folder


def decoded(row: np.ndarray, words: list[str]) -> list[str]:
    """Return the words of a row, without the special tokens."""
    padding, unknown, begin, end = specials(len(words))
    names = {unknown: "?", **dict(enumerate(words, start=1))}
    assert row[0] == begin
    inner = [number for number in row[1:] if number != padding]
    assert list(row[1:]) == inner + [padding] * (len(row) - 1 - len(inner))
    if len(inner) < len(row) - 1 or inner[-1] == end:
        assert inner.pop() == end
    return [names[number] for number in inner]


@given(st.lists(st.lists(st.sampled_from([*WORDS, "unknown", ""]), max_size=9)), st.integers(1, 6), st.integers(1, 7))
def test_rows_decode_to_the_first_words_of_their_sentences(
    sentences: list[list[str]], length: int, vocabulary: int
) -> None:
    frequent = WORDS[:vocabulary]
    rows = sequences(sentences, {word: number for number, word in enumerate(frequent, start=1)}, length)
    assert rows.shape == (len(sentences), length + 1)
    for row, sentence in zip(rows, sentences, strict=True):
        assert decoded(row, frequent) == [word if word in frequent else "?" for word in sentence[:length]]


def test_tokens_are_those_of_reddi_et_al() -> None:
    numbers = {f"w{number}": number for number in range(1, 10_001)}
    rows = sequences([["w1", "w10000", "w10001"], ["w7"] * 20, ["w7"] * 25], numbers, 20)
    assert rows[0].tolist() == [10_002, 1, 10_000, 10_001, 10_003] + [0] * 16
    assert rows[1].tolist() == rows[2].tolist() == [10_002] + [7] * 20
    assert specials(10_000) == (0, 10_001, 10_002, 10_003)


@pytest.mark.parametrize(("words", "kind"), [(32_763, np.int16), (32_764, np.int32)])
def test_tokens_take_two_bytes_if_they_fit(words: int, kind: type) -> None:
    rows = sequences([["a"]], {str(number): number for number in range(words)}, 3)
    assert rows.dtype == kind
    assert rows.tolist() == [[words + 2, words + 1, words + 3, 0]]


@pytest.mark.parametrize("stored", [vlen, fixed])
def test_the_sentences_of_a_user_are_the_examples_of_a_client(data: Path, stored: Callable[..., Any]) -> None:
    write(data / "stackoverflow_train.h5", USERS, stored)
    dataset = catalog.load("stackoverflow", SETTINGS)
    assert (dataset.classes, dataset.specials) == (9, (0, 6, 7, 8))
    federated = partition_dataset("stackoverflow", dataset, 0, "key")
    assert federated.partition.sizes.tolist() == [2, 1, 3]
    first, _, last = (federated.client(client) for client in range(3))
    assert first.inputs.tolist() == [[7, 5, 2, 6], [7, 3, 6, 1]]
    assert first.targets.tolist() == [[5, 2, 6, 8], [3, 6, 1, 6]]
    assert last.targets.tolist() == [
        [6, 8, 0, 0],
        [4, 6, 6, 8],
        [1, 2, 3, 4],
    ]  # two blanks have an empty word between them
    assert sorted(federated.test.targets.tolist()) == [[2, 1, 8, 0], [3, 3, 3, 8], [5, 8, 0, 0]]
    losses = per_sequence_cross_entropy(federated.specials)(first.inputs.new_ones(2, 4, 9).float(), first.targets)
    np.testing.assert_allclose(losses, np.log(9), rtol=1e-6)


def test_fewer_users_are_a_subset_of_more_users(data: Path) -> None:
    write(data / "stackoverflow_train.h5", {f"{user:08}": ["the"] * (user + 1) for user in range(20)})
    few, more = (stackoverflow.stackoverflow(**{**SETTINGS, "users": users}).keys for users in (4, 9))
    assert few is not None
    assert more is not None
    assert (len(np.unique(few)), len(np.unique(more))) == (4, 9)
    assert set(few) < set(more)
    assert all((few == user).sum() == user + 1 for user in set(few))


def test_the_number_of_test_sentences_is_limited(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stackoverflow, "TEST_SENTENCES", 2)
    assert len(stackoverflow.stackoverflow(**SETTINGS).test) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"users": 4}, r"data.users must be at most 3, .*stackoverflow_train.h5' \(got 4\)"),
        ({"vocabulary": 8}, r"data.vocabulary must be at most 7, .*stackoverflow.word_count' \(got 8\)"),
        ({"length": 0}, "data.length must be greater than or equal to 1"),
    ],
)
def test_settings_beyond_the_files_are_refused(data: Path, settings: dict[str, int], words: str) -> None:
    with pytest.raises(KeelError, match=words):
        catalog.load("stackoverflow", {**SETTINGS, **settings})


@pytest.mark.parametrize("name", ["stackoverflow_train.h5", "stackoverflow_test.h5"])
def test_damaged_files_are_refused(data: Path, name: str) -> None:
    whole = (data / name).read_bytes()
    for content in b"", b"no HDF5", whole[: len(whole) // 2]:
        (data / name).write_bytes(content)
        with pytest.raises(KeelError, match=f"{name}' is damaged or not TFF's Stack Overflow"):
            stackoverflow.stackoverflow(**SETTINGS)
    assert [path for path in (data.parent / "prepared").iterdir() if path.is_dir()] == []


def test_files_without_sentences_are_refused(data: Path) -> None:
    write(data / "stackoverflow_test.h5", {"00000002": []})
    with pytest.raises(KeelError, match="at least one example"):
        stackoverflow.stackoverflow(**SETTINGS)


def test_hdf5_files_with_other_content_are_refused(data: Path) -> None:
    file = data / "stackoverflow_train.h5"
    for path, content in (
        ("images/00000001/tokens", [b"the"]),
        ("examples", [b"the"]),
        ("examples/00000001/text", [b"the"]),
        ("examples/00000001/tokens", [1, 2]),
        ("examples/00000001/tokens", 1),
        ("examples/00000001/tokens", [b"\xff\xfe"]),
    ):
        with h5py.File(file, "w") as opened:
            opened[path] = content
        with pytest.raises(KeelError, match=r"stackoverflow_train.h5' is damaged or not TFF's Stack Overflow"):
            stackoverflow.stackoverflow(**{**SETTINGS, "users": 1})


@pytest.mark.parametrize("content", [b"the 7\nto\n", b"the 7\n\xff\xfe 3\n", b"the 7\n\nto 4\n", b"the 7 8\n"])
def test_damaged_word_counts_are_refused(data: Path, content: bytes) -> None:
    (data / "stackoverflow.word_count").write_bytes(content)
    with pytest.raises(KeelError, match=r"stackoverflow.word_count' is damaged or has no word counts"):
        stackoverflow.stackoverflow(**SETTINGS)


def test_without_h5py_the_error_names_the_extra(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(KeelError, match=r"requires h5py: pip install 'keel-fl\[text\]'"):
        stackoverflow.stackoverflow(**SETTINGS)
