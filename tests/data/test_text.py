import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel import Dataset, KeelError
from keel.data import catalog
from keel.data.partition import partition_dataset
from keel.data.text import most_frequent, split, split_sentences


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "data"))
    return tmp_path


def write(file: Path, *lines: tuple[Any, Any]) -> str:
    file.write_text("".join(json.dumps({"user": user, "text": text, "id": 3}) + "\n" for user, text in lines))
    return str(file)


def load(**settings: Any) -> Dataset:
    return catalog.load("text", settings)


def test_sentences_end_at_punctuation_and_line_breaks() -> None:
    assert split("Is it 3.5%? It isn’t!! It's_a\nNEW line...\r\n\r\nÉté: e.g. that - yes.\n?") == [
        ["is", "it", "3", "5"],
        ["it", "isn't"],
        ["it's", "a"],
        ["new", "line"],
        ["été", "e", "g"],
        ["that", "yes"],
    ]


@given(st.lists(st.lists(st.from_regex("[a-c]+('[a-c]+)?", fullmatch=True), min_size=1), max_size=9))
def test_split_inverts_joining_words_and_sentences(sentences: list[list[str]]) -> None:
    assert split(". ".join(" ".join(sentence) for sentence in sentences)) == sentences


@given(st.lists(st.lists(st.sampled_from("abcdef"))), st.integers(1, 8))
def test_words_are_numbered_by_frequency(sentences: list[list[str]], vocabulary: int) -> None:
    written = [word for sentence in sentences for word in sentence]
    ranks = sorted((-written.count(word), word) for word in set(written))
    expected = [word for _, word in ranks[:vocabulary]]
    assert most_frequent(sentences, vocabulary) == {word: place for place, word in enumerate(expected, start=1)}


@given(st.dictionaries(st.sampled_from("uvw"), st.integers(1, 23)))
def test_the_last_fifth_of_each_users_sentences_is_held_out(sizes: dict[str, int]) -> None:
    sentences = {user: [[f"{user}{i}"] for i in range(size)] for user, size in sizes.items()}
    train, test = split_sentences(sentences)
    assert {user: train[user] + test.get(user, []) for user in train} == sentences
    assert {user: len(of_user) for user, of_user in test.items()} == {u: n // 5 for u, n in sizes.items() if n >= 5}


def test_the_sentences_of_a_user_are_the_examples_of_a_client(data: Path) -> None:
    file = write(data / "a.jsonl", ("ann", "one two. two three! two"), (7, "Zero."), ("ann", "two.\none one.  "))
    dataset = load(file=file, vocabulary=2, length=3)
    assert (dataset.classes, dataset.specials) == (6, (0, 3, 4, 5))  # two: 1, one: 2 (before three and zero)
    federated = partition_dataset("text", dataset, 0, "key")
    ann, seven = federated.client(0), federated.client(1)
    assert ann.inputs.tolist() == [[4, 2, 1], [4, 1, 3], [4, 1, 5], [4, 1, 5]]
    assert ann.targets.tolist() == [[2, 1, 5], [1, 3, 5], [1, 5, 0], [1, 5, 0]]
    assert seven.targets.tolist() == [[3, 5, 0]]
    assert federated.test.targets.tolist() == [[2, 2, 5]]
    assert dataset.train.inputs.dtype.itemsize == 2


def test_a_small_vocabulary_has_fewer_classes(data: Path) -> None:
    file = write(data / "a.jsonl", ("ann", "a b. " * 5))
    assert load(file=file).classes == 2 + 4


def test_test_sentences_keep_their_users_if_some_of_them_train(data: Path) -> None:
    train = write(data / "a.jsonl", ("ann", "a b. c."), ("ben", "c."))
    some_train = load(file=train, test_file=write(data / "b.jsonl", ("cleo", "z."), ("ben", "c. a b z.")))
    assert len(some_train.train) == 3
    federated = partition_dataset("text", some_train, 0, "key")
    assert federated.test.targets[:, :4].tolist() == [[1, 6, 0, 0], [2, 3, 4, 6]]  # z is not in the vocabulary
    others = load(file=train, test_file=write(data / "c.jsonl", ("cleo", "z. a.")))
    assert others.test_keys is None
    assert len(partition_dataset("text", others, 0, "key").test) == 2


def test_a_changed_test_file_is_prepared_again(data: Path) -> None:
    train = write(data / "a.jsonl", ("ann", "a b. c."))
    first = load(file=train, test_file=write(data / "b.jsonl", ("ann", "a.")))
    again = load(file=train, test_file=write(data / "b.jsonl", ("ann", "a. b.")))
    assert (len(first.test), len(again.test)) == (1, 2)
    assert first.sha256 != again.sha256


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "null",
        '"text"',
        '{"user": "a"}',
        '{"user": ["a"], "text": "b"}',
        '{"user": "a", "text": 3}',
        "[" * 9**5,
    ],
)
def test_an_invalid_line_is_refused_with_file_and_number(data: Path, line: str) -> None:
    (data / "a.jsonl").write_text(f'{{"user": "ann", "text": "a"}}\n\n{line}\n')
    with pytest.raises(KeelError, match=r"line 3 of '.*a.jsonl' must be \{\"user\""):
        load(file=str(data / "a.jsonl"))
    assert [path for path in (data / "data" / "prepared").iterdir() if path.is_dir()] == []


def test_a_binary_file_is_refused(data: Path) -> None:
    (data / "a.jsonl").write_bytes(b"\xff\xfe\x00\x00\n")
    with pytest.raises(KeelError, match=r"line 1 of .*a.jsonl'"):
        load(file=str(data / "a.jsonl"))


def test_missing_files_and_too_few_sentences_are_refused(data: Path) -> None:
    file = write(data / "a.jsonl", ("ann", "a. b. c. d."))
    with pytest.raises(KeelError, match=r"data.file: file '.*nowhere.jsonl' does not exist"):
        load(file=str(data / "nowhere.jsonl"))
    with pytest.raises(KeelError, match=r"data.test_file: file '.*nowhere.jsonl' does not exist"):
        load(file=file, test_file=str(data / "nowhere.jsonl"))
    with pytest.raises(KeelError, match=r"a.jsonl' has no user with 5 sentences .*set data.test_file"):
        load(file=file)
    empty = write(data / "b.jsonl", ("ann", "..."))
    with pytest.raises(KeelError, match=r"b.jsonl' has no words"):
        load(file=file, test_file=empty)
    with pytest.raises(KeelError, match=r"b.jsonl' has no words"):
        load(file=empty, test_file=file)


REAL = os.environ.get("KEEL_DATA")


def test_posts_of_stack_exchange_have_the_expected_statistics() -> None:
    file = Path(REAL or "") / "stackexchange" / "beer.jsonl"
    if not REAL or not file.is_file():
        pytest.skip("requires stackexchange/beer.jsonl in KEEL_DATA")
    dataset = load(file=str(file))
    assert dataset.keys is not None
    assert len(np.unique(dataset.keys)) == 781
    assert dataset.classes == 10_004
    federated = partition_dataset("text", dataset, 0, "key", min_examples=20)
    words = federated.test.targets[federated.test.targets != 0]
    assert (words == dataset.specials[1]).float().mean() < 0.1
