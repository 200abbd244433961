import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel import KeelError
from keel.data import catalog
from keel.data.federated import Pool
from keel.data.partition import deal_out
from keel.data.text import held_out, most_frequent, split


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "data"))
    return tmp_path


def write(file: Path, *lines: tuple[Any, Any]) -> str:
    file.write_text("".join(json.dumps({"user": user, "text": text, "id": 3}) + "\n" for user, text in lines))
    return str(file)


def load(**settings: Any) -> Pool:
    return catalog.load("text", settings)


def test_sentences_end_at_marks_and_line_breaks() -> None:
    assert split("Is it 3.5%? It isn’t!! It's_a\nNEW line...\r\n\r\nÉté: e.g. that - yes.\n?") == [
        ["is", "it", "3", "5"],
        ["it", "isn't"],
        ["it's", "a"],
        ["new", "line"],
        ["été", "e", "g"],
        ["that", "yes"],
    ]


@given(st.lists(st.lists(st.from_regex("[a-c]+('[a-c]+)?", fullmatch=True), min_size=1), max_size=9))
def test_words_are_found_again(sentences: list[list[str]]) -> None:
    assert split(". ".join(" ".join(sentence) for sentence in sentences)) == sentences


@given(st.lists(st.lists(st.sampled_from("abcdef"))), st.integers(1, 8))
def test_words_are_numbered_by_how_often_they_are_used(sentences: list[list[str]], vocabulary: int) -> None:
    written = [word for sentence in sentences for word in sentence]
    ranks = sorted((-written.count(word), word) for word in set(written))
    expected = [word for _, word in ranks[:vocabulary]]
    assert most_frequent(sentences, vocabulary) == {word: place for place, word in enumerate(expected, start=1)}


@given(st.dictionaries(st.sampled_from("uvw"), st.integers(1, 23)))
def test_the_last_fifth_of_each_user_s_sentences_is_held_out(sizes: dict[str, int]) -> None:
    sentences = {user: [[f"{user}{i}"] for i in range(size)] for user, size in sizes.items()}
    train, test = held_out(sentences)
    assert {user: train[user] + test.get(user, []) for user in train} == sentences
    assert {user: len(said) for user, said in test.items()} == {u: n // 5 for u, n in sizes.items() if n >= 5}


def test_a_user_s_sentences_are_a_client_s_examples(data: Path) -> None:
    file = write(data / "a.jsonl", ("ann", "one two. two three! two"), (7, "Zero."), ("ann", "two.\none one.  "))
    pool = load(file=file, vocabulary=2, length=3)
    assert (pool.classes, pool.specials) == (6, (0, 3, 4, 5))  # two: 1, one: 2 (before three and zero)
    dealt = deal_out("text", pool, 0, "key")
    ann, seven = dealt.client(0), dealt.client(1)
    assert ann.inputs.tolist() == [[4, 2, 1], [4, 1, 3], [4, 1, 5], [4, 1, 5]]
    assert ann.targets.tolist() == [[2, 1, 5], [1, 3, 5], [1, 5, 0], [1, 5, 0]]
    assert seven.targets.tolist() == [[3, 5, 0]]
    assert dealt.test.targets.tolist() == [[2, 2, 5]]
    assert pool.train.inputs.dtype.itemsize == 2


def test_fewer_words_than_asked_for_are_fewer_classes(data: Path) -> None:
    file = write(data / "a.jsonl", ("ann", "a b. " * 5))
    assert load(file=file).classes == 2 + 4


def test_a_test_file_is_for_the_users_it_names_or_for_everybody(data: Path) -> None:
    train = write(data / "a.jsonl", ("ann", "a b. c."), ("ben", "c."))
    theirs = load(file=train, test_file=write(data / "b.jsonl", ("cleo", "z."), ("ben", "c. a b z.")))
    assert len(theirs.train) == 3
    dealt = deal_out("text", theirs, 0, "key")
    assert dealt.test.targets[:, :4].tolist() == [[1, 6, 0, 0], [2, 3, 4, 6]]  # z is another word
    others = load(file=train, test_file=write(data / "c.jsonl", ("cleo", "z. a.")))
    assert others.test_keys is None
    assert len(deal_out("text", others, 0, "key").test) == 2


def test_another_test_file_is_prepared_anew(data: Path) -> None:
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
def test_a_bad_line_is_refused_with_file_and_number(data: Path, line: str) -> None:
    (data / "a.jsonl").write_text(f'{{"user": "ann", "text": "a"}}\n\n{line}\n')
    with pytest.raises(KeelError, match=r"a.jsonl' line 3 does not tell who wrote what; accepted: \{\"user\""):
        load(file=str(data / "a.jsonl"))
    assert [path for path in (data / "data" / "prepared").iterdir() if path.is_dir()] == []


def test_a_binary_file_is_refused(data: Path) -> None:
    (data / "a.jsonl").write_bytes(b"\xff\xfe\x00\x00\n")
    with pytest.raises(KeelError, match=r"a.jsonl' line 1 "):
        load(file=str(data / "a.jsonl"))


def test_missing_files_and_too_few_sentences_are_refused(data: Path) -> None:
    file = write(data / "a.jsonl", ("ann", "a. b. c. d."))
    with pytest.raises(KeelError, match=r"data.file: no file .*nowhere.jsonl'"):
        load(file=str(data / "nowhere.jsonl"))
    with pytest.raises(KeelError, match=r"data.test_file: no file .*nowhere.jsonl'"):
        load(file=file, test_file=str(data / "nowhere.jsonl"))
    with pytest.raises(KeelError, match=r"a.jsonl' has no user with 5 sentences; accepted: data.test_file"):
        load(file=file)
    empty = write(data / "b.jsonl", ("ann", "..."))
    with pytest.raises(KeelError, match=r"b.jsonl' has no words"):
        load(file=file, test_file=empty)
    with pytest.raises(KeelError, match=r"b.jsonl' has no words"):
        load(file=empty, test_file=file)


REAL = os.environ.get("KEEL_DATA")


def test_real_posts_of_stack_exchange() -> None:
    file = Path(REAL or "") / "stackexchange" / "beer.jsonl"
    if not REAL or not file.is_file():
        pytest.skip("needs stackexchange/beer.jsonl in KEEL_DATA")
    pool = load(file=str(file))
    assert pool.keys is not None
    assert len(np.unique(pool.keys)) == 781
    assert pool.classes == 10_004
    dealt = deal_out("text", pool, 0, "key", min_examples=20)
    words = dealt.test.targets[dealt.test.targets != 0]
    assert (words == pool.specials[1]).float().mean() < 0.1
