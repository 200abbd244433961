import json
import os
import re
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel import Dataset, KeelError
from keel.data import catalog, shakespeare
from keel.data.partition import partition_dataset
from keel.data.shakespeare import LENGTH, VOCABULARY, encode, roles, windows

SPOKEN = " ".join(f"I have {i} things to say of kings and of the crowns that they do wear." for i in range(5))

PLAY = f"""The first line by William Shakespeare is skipped
by William Shakespeare
  POET. {SPOKEN}
    {SPOKEN}
    {SPOKEN}
  LADY. {SPOKEN}
    {SPOKEN}
    {SPOKEN}



1603

ALLS WELL, THAT ENDS






by William Shakespeare

Dramatis Personae

    not yet a speech
  Sir Toby. {SPOKEN}
    And   goes on.
    And on.
  SIR TOBY. He is the same.
 one blank is no indent
    but he still speaks
  MARIA. {SPOKEN}
    {SPOKEN}
  DUKE. One.
    Two.
    {SPOKEN}

THE COMEDY OF ERRORS


by William Shakespeare
AEGEON. {SPOKEN}
and the next line has no indent

<Exit>
nobody speaks
ACT II. Scene 1
nobody speaks here either
Luciana. {SPOKEN}
YES. {SPOKEN}
LUCIANA. No.
No.
<Exeunt>
ALONE

by William Shakespeare
  ALONE. {SPOKEN}
    {SPOKEN}
    {SPOKEN}
"""


def samples_by_leaf(text: str) -> dict[str, list[tuple[str, str]]]:
    """LEAF's rules, implemented a second time as one loop over the lines."""
    lines = text.split("\n")[1:]
    authors = 0
    play: OrderedDict[str, list[str]] | None = None
    plays, role, errors = [], "", False
    for i, line in enumerate(lines):
        authors += "by William Shakespeare" in line
        if authors < 2:
            continue
        if "by William Shakespeare" in line:
            title = ""
            for back in (2, 3, 4, 5, 6, 7):
                title = title or lines[i - back].strip()
            errors = title == "THE COMEDY OF ERRORS"
            play, role = OrderedDict(), ""
            plays.append((title, play))
            continue
        assert play is not None
        indent = "" if errors else "  "
        name, stop, rest = line[len(indent) :].partition(". ")
        speaks = line.startswith(indent) and stop and re.fullmatch("[a-zA-Z][a-zA-Z ]*", name)
        if speaks and errors and name.upper().startswith("ACT "):
            role = ""
        elif speaks:
            role = name.upper()
            play.setdefault(role, []).append(rest)
        elif role and errors and line.startswith("<"):
            role = ""
        elif role and line.startswith(2 * indent):
            play[role].append(line[2 * len(indent) :])
    samples: dict[str, list[tuple[str, str]]] = {}
    users: dict[str, str] = {}
    for title, play in plays:
        for role, spoken in play.items():
            if len(play) > 1 and len(spoken) > 2:
                user = re.sub(r"\W+", "_", f"{title}_{role}".replace(" ", "_"))
                users[user] = users.get(user, "") + "\n".join(spoken) + "\n"
    for user, spoken in users.items():
        joined = re.sub("  +", " ", spoken.replace("\n", " "))
        if len(joined) > 80:
            samples[user] = [(joined[i : i + 80], joined[i + 80]) for i in range(len(joined) - 80)]
    return samples


def samples_of(text: str) -> list[tuple[str, str]]:
    return [(text[i : i + LENGTH], text[i + LENGTH]) for i in range(len(text) - LENGTH)]


def decoded(numbers: np.ndarray) -> str:
    return "".join(VOCABULARY[number] for number in numbers)


def test_roles_and_their_lines_are_extracted() -> None:
    assert roles(PLAY) == {
        "ALLS_WELL__THAT_ENDS_SIR_TOBY": f"{SPOKEN} And goes on. And on. He is the same. but he still speaks ",
        "ALLS_WELL__THAT_ENDS_DUKE": f"One. Two. {SPOKEN} ",
        "THE_COMEDY_OF_ERRORS_AEGEON": f"{SPOKEN} and the next line has no indent ",
        "THE_COMEDY_OF_ERRORS_LUCIANA": f"{SPOKEN} No. No. ",
    }


@given(st.lists(st.sampled_from(PLAY.splitlines()), max_size=60))
def test_any_order_of_lines_is_parsed_as_leaf_does(lines: list[str]) -> None:
    text = "\n".join([*PLAY.splitlines(), *lines])
    assert {role: samples_of(lines) for role, lines in roles(text).items()} == samples_by_leaf(text)


@given(st.lists(st.integers(LENGTH + 1, 900), min_size=1, max_size=6), st.floats(0.01, 0.99), st.integers(0, 99))
def test_samples_are_80_characters_of_one_role_and_the_next(lengths: list[int], fraction: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spoken = ["".join(rng.choice([*VOCABULARY], length)) for length in lengths]
    arrays = windows([encode(text, Path("f")) for text in spoken], fraction)
    text, rows = arrays["text"], arrays["rows"]
    train = [(decoded(text[row : row + LENGTH]), decoded(text[[row + LENGTH]])) for row in rows]
    test = [(decoded(x), decoded([y])) for x, y in zip(arrays["test_inputs"], arrays["test_targets"], strict=True)]
    expected: dict[str, list] = {"train": [], "test": [], "keys": [], "test_keys": []}
    for role, lines in enumerate(spoken):
        samples = samples_of(lines)
        cut = max(1, int(fraction * len(samples)))
        if len(samples) > cut + LENGTH - 1:
            expected["train"] += samples[:cut]
            expected["test"] += samples[cut + LENGTH - 1 :]
            expected["keys"] += [role] * cut
            expected["test_keys"] += [role] * (len(samples) - cut - LENGTH + 1)
    assert train == expected["train"]
    assert test == expected["test"]
    assert arrays["keys"].tolist() == expected["keys"]
    assert arrays["test_keys"].tolist() == expected["test_keys"]


@given(st.text(VOCABULARY))
def test_encoding_can_be_inverted(text: str) -> None:
    assert decoded(encode(text, Path("f"))) == text


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    (tmp_path / "shakespeare").mkdir()
    return tmp_path


@pytest.fixture
def small_play(data: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, str]]]:
    samples = samples_by_leaf(PLAY)
    monkeypatch.setattr(shakespeare, "ROLES", len(samples))
    monkeypatch.setattr(shakespeare, "LINES_SHA256", sha256("\n".join(roles(PLAY).values()).encode()).hexdigest())
    monkeypatch.setattr(shakespeare, "SAMPLES", sum(map(len, samples.values())))
    (data / shakespeare.FILE).write_text(PLAY, encoding="utf-8")
    return samples


def test_samples_of_every_role_are_views_of_one_text(small_play: dict[str, list[tuple[str, str]]]) -> None:
    dataset = catalog.load("shakespeare", {"fraction": 0.5})
    assert dataset.train.inputs.untyped_storage().nbytes() < 3 * len(PLAY)
    data = partition_dataset("shakespeare", dataset, 0, "key")
    kept = [samples for samples in small_play.values() if len(samples) > len(samples) // 2 + 79]
    assert data.partition.clients == len(kept) > 1
    for client, samples in enumerate(kept):
        examples = data.client(client)
        found = [(decoded(x), decoded([y])) for x, y in zip(examples.inputs, examples.targets, strict=True)]
        assert found == samples[: len(samples) // 2]
    assert len(data.test) == sum(len(samples) - len(samples) // 2 - 79 for samples in kept)
    assert data.input_shape == (80,)


def test_another_text_than_gutenbergs_is_refused_with_its_counts(data: Path) -> None:
    (data / shakespeare.FILE).write_text(PLAY, encoding="utf-8")
    with pytest.raises(
        KeelError, match=r"gutenberg100.txt' must give 1,129 roles and 4,226,158 samples .*\(got 4 and "
    ):
        shakespeare.shakespeare()
    assert [path for path in (data / "prepared").iterdir() if path.is_dir()] == []


def test_a_missing_or_binary_text_and_no_test_samples_are_refused(
    data: Path, small_play: dict[str, list[tuple[str, str]]]
) -> None:
    with pytest.raises(KeelError, match=r"fraction: 0.999 leaves no test samples"):
        shakespeare.shakespeare(fraction=0.999)
    (data / shakespeare.FILE).write_bytes(b"\xff\xfe\x00text")
    with pytest.raises(KeelError, match=r"gutenberg100.txt' is damaged or not a text"):
        shakespeare.shakespeare()
    (data / shakespeare.FILE).unlink()
    with pytest.raises(KeelError, match=r"file .*gutenberg100.txt' does not exist; save 100.txt of https"):
        shakespeare.shakespeare()


def write_leaf(data: Path, samples: dict[str, list[tuple[str, str]]], part: str, name: str = "all_data") -> Path:
    user_data = {u: {"x": [x for x, _ in of_user], "y": [y for _, y in of_user]} for u, of_user in samples.items()}
    file = data / "shakespeare" / part / f"{name}_niid_0_keep_0_{part}_8.json"
    file.parent.mkdir(exist_ok=True)
    # LEAF's split does not update num_samples of the test part
    file.write_text(json.dumps({"users": [*user_data], "num_samples": [7] * len(user_data), "user_data": user_data}))
    return file


def leaf_dataset(data: Path) -> Dataset:
    return catalog.load("shakespeare", {"source": "leaf"})


def test_samples_of_leaf_files_are_loaded(data: Path) -> None:
    samples = samples_by_leaf(PLAY)
    write_leaf(data, {user: of_user[:9] for user, of_user in samples.items()}, "train")
    write_leaf(data, {user: of_user[-2:] for user, of_user in samples.items()}, "test")
    dataset = leaf_dataset(data)
    assert dataset.classes == 80
    for part, keys, cut in (dataset.train, dataset.keys, slice(9)), (dataset.test, dataset.test_keys, slice(-2, None)):
        found = [(decoded(x), decoded([y])) for x, y in zip(part.inputs, part.targets, strict=True)]
        assert found == [sample for of_user in samples.values() for sample in of_user[cut]]
        assert keys is not None
        assert keys.tolist() == [user for user, of_user in enumerate(samples.values()) for _ in of_user[cut]]


def test_a_split_by_user_has_no_test_keys(data: Path) -> None:
    samples = samples_by_leaf(PLAY)
    first, *others = samples
    write_leaf(data, {first: samples[first]}, "test")
    write_leaf(data, {user: samples[user] for user in others}, "train")
    assert leaf_dataset(data).test_keys is None


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (("x" * 80, "é"), "must have only characters of .* .got 'é'."),
        (("x" * 79 + "\ud800", "y"), "must have only characters of .* .got '.ud800'."),
        (("x" * 79, "y"), "must have x of 80 characters"),
        (("x" * 80, "yy"), "y of one"),
        (("x" * 80, 3), "y of one"),
    ],
)
def test_invalid_samples_are_refused_with_the_file(data: Path, sample: tuple, words: str) -> None:
    write_leaf(data, {"A_B": [("x" * 80, "y")]}, "test")
    file = write_leaf(data, {"A_B": [("x" * 80, "y"), sample]}, "train")
    with pytest.raises(KeelError, match=words) as refused:
        leaf_dataset(data)
    assert str(file) in str(refused.value)


def test_the_error_for_missing_leaf_files_names_their_source(data: Path) -> None:
    with pytest.raises(KeelError, match=r"train' has no \*\.json files; make them with https"):
        shakespeare.shakespeare(source="leaf")


@pytest.mark.parametrize(
    ("fraction", "users", "train", "test"), [(0.9, 660, 3_678_451, 356_921), (0.8, 799, 3_335_126, 771_050)]
)
def test_gutenbergs_text_gives_leafs_counts(fraction: float, users: int, train: int, test: int) -> None:
    folder = os.environ.get("KEEL_DATA")
    if folder is None or not (Path(folder) / shakespeare.FILE).is_file():
        pytest.skip(f"requires {shakespeare.FILE} in KEEL_DATA")
    dataset = shakespeare.shakespeare(fraction=fraction)
    assert dataset.rows is not None
    assert dataset.keys is not None
    assert dataset.test_keys is not None
    assert (len(dataset.rows), len(dataset.keys), len(dataset.test)) == (train, train, test)
    assert len(np.unique(dataset.keys)) == len(np.unique(dataset.test_keys)) == users
    assert decoded(dataset.train.inputs[0]) == SPEECH[:80]
    assert decoded(dataset.train.targets[:20]) == SPEECH[80:100]


SPEECH = "In delivering my son from me, I bury a second husband. What hope is there of his Majesty's amendment? This"
