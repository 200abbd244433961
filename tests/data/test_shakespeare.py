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

from keel import KeelError
from keel.data import catalog, shakespeare
from keel.data.federated import Pool
from keel.data.partition import deal_out
from keel.data.shakespeare import LENGTH, VOCABULARY, encode, roles, windows

SPOKEN = " ".join(f"I have {i} things to say of kings and of the crowns that they do wear." for i in range(5))

PLAY = f"""The first line by William Shakespeare is not looked at
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
    """LEAF's rules a second time, as one walk over the lines with all of its state in sight."""
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
        said = re.sub("  +", " ", spoken.replace("\n", " "))
        if len(said) > 80:
            samples[user] = [(said[i : i + 80], said[i + 80]) for i in range(len(said) - 80)]
    return samples


def samples_of(text: str) -> list[tuple[str, str]]:
    return [(text[i : i + LENGTH], text[i + LENGTH]) for i in range(len(text) - LENGTH)]


def decoded(numbers: np.ndarray) -> str:
    return "".join(VOCABULARY[number] for number in numbers)


def test_the_roles_of_a_play_and_what_they_say() -> None:
    assert roles(PLAY) == {
        "ALLS_WELL__THAT_ENDS_SIR_TOBY": f"{SPOKEN} And goes on. And on. He is the same. but he still speaks ",
        "ALLS_WELL__THAT_ENDS_DUKE": f"One. Two. {SPOKEN} ",
        "THE_COMEDY_OF_ERRORS_AEGEON": f"{SPOKEN} and the next line has no indent ",
        "THE_COMEDY_OF_ERRORS_LUCIANA": f"{SPOKEN} No. No. ",
    }


@given(st.lists(st.sampled_from(PLAY.splitlines()), max_size=60))
def test_any_order_of_lines_is_read_as_leaf_reads_it(lines: list[str]) -> None:
    text = "\n".join([*PLAY.splitlines(), *lines])
    assert {role: samples_of(said) for role, said in roles(text).items()} == samples_by_leaf(text)


@given(st.lists(st.integers(LENGTH + 1, 900), min_size=1, max_size=6), st.floats(0.01, 0.99), st.integers(0, 99))
def test_a_sample_is_what_one_role_says_and_its_next_character(lengths: list[int], fraction: float, seed: int) -> None:
    stream = np.random.default_rng(seed)
    said = ["".join(stream.choice([*VOCABULARY], length)) for length in lengths]
    arrays = windows([encode(text, Path("f")) for text in said], fraction)
    text, rows = arrays["text"], arrays["rows"]
    train = [(decoded(text[row : row + LENGTH]), decoded(text[[row + LENGTH]])) for row in rows]
    test = [(decoded(x), decoded([y])) for x, y in zip(arrays["test_inputs"], arrays["test_targets"], strict=True)]
    expected: dict[str, list] = {"train": [], "test": [], "keys": [], "test_keys": []}
    for role, spoken in enumerate(said):
        samples = samples_of(spoken)
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
def test_characters_are_read_back(text: str) -> None:
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
    monkeypatch.setattr(shakespeare, "LINES", sha256("\n".join(roles(PLAY).values()).encode()).hexdigest())
    monkeypatch.setattr(shakespeare, "SAMPLES", sum(map(len, samples.values())))
    (data / shakespeare.FILE).write_text(PLAY, encoding="utf-8")
    return samples


def test_a_pool_has_every_role_s_samples_as_views_of_one_text(small_play: dict[str, list[tuple[str, str]]]) -> None:
    pool = catalog.load("shakespeare", {"fraction": 0.5})
    assert pool.train.inputs.untyped_storage().nbytes() < 3 * len(PLAY)
    data = deal_out("shakespeare", pool, 0, "key")
    kept = [samples for samples in small_play.values() if len(samples) > len(samples) // 2 + 79]
    assert data.partition.clients == len(kept) > 1
    for client, samples in enumerate(kept):
        mine = data.client(client)
        found = [(decoded(x), decoded([y])) for x, y in zip(mine.inputs, mine.targets, strict=True)]
        assert found == samples[: len(samples) // 2]
    assert len(data.test) == sum(len(samples) - len(samples) // 2 - 79 for samples in kept)
    assert data.input_shape == (80,)


def test_a_text_that_is_not_gutenberg_s_is_refused_with_what_was_found(data: Path) -> None:
    (data / shakespeare.FILE).write_text(PLAY, encoding="utf-8")
    with pytest.raises(KeelError, match=r"gutenberg100.txt' gives 4 roles and .* accepted: 1,129 and 4,226,158"):
        shakespeare.shakespeare()
    assert [path for path in (data / "prepared").iterdir() if path.is_dir()] == []


def test_no_text_no_test_sample_and_no_text_at_all_are_refused(
    data: Path, small_play: dict[str, list[tuple[str, str]]]
) -> None:
    with pytest.raises(KeelError, match=r"fraction: 0.999 leaves no role a test sample"):
        shakespeare.shakespeare(fraction=0.999)
    (data / shakespeare.FILE).write_bytes(b"\xff\xfe\x00text")
    with pytest.raises(KeelError, match=r"gutenberg100.txt' is damaged or no text"):
        shakespeare.shakespeare()
    (data / shakespeare.FILE).unlink()
    with pytest.raises(KeelError, match=r"no file .*gutenberg100.txt'; accepted: 100.txt of https"):
        shakespeare.shakespeare()


def write_leaf(data: Path, samples: dict[str, list[tuple[str, str]]], part: str, name: str = "all_data") -> Path:
    user_data = {u: {"x": [x for x, _ in held], "y": [y for _, y in held]} for u, held in samples.items()}
    file = data / "shakespeare" / part / f"{name}_niid_0_keep_0_{part}_8.json"
    file.parent.mkdir(exist_ok=True)
    # the split of LEAF leaves num_samples of the test part as they were
    file.write_text(json.dumps({"users": [*user_data], "num_samples": [7] * len(user_data), "user_data": user_data}))
    return file


def leaf_pool(data: Path) -> Pool:
    return catalog.load("shakespeare", {"source": "leaf"})


def test_leaf_s_json_gives_its_samples(data: Path) -> None:
    samples = samples_by_leaf(PLAY)
    write_leaf(data, {user: held[:9] for user, held in samples.items()}, "train")
    write_leaf(data, {user: held[-2:] for user, held in samples.items()}, "test")
    pool = leaf_pool(data)
    assert pool.classes == 80
    for part, keys, cut in (pool.train, pool.keys, slice(9)), (pool.test, pool.test_keys, slice(-2, None)):
        found = [(decoded(x), decoded([y])) for x, y in zip(part.inputs, part.targets, strict=True)]
        assert found == [sample for held in samples.values() for sample in held[cut]]
        assert keys is not None
        assert keys.tolist() == [user for user, held in enumerate(samples.values()) for _ in held[cut]]


def test_a_split_by_user_has_test_samples_for_everybody(data: Path) -> None:
    samples = samples_by_leaf(PLAY)
    first, *others = samples
    write_leaf(data, {first: samples[first]}, "test")
    write_leaf(data, {user: samples[user] for user in others}, "train")
    assert leaf_pool(data).test_keys is None


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (("x" * 80, "é"), "has the character 'é'"),
        (("x" * 79 + "\ud800", "y"), "has the character '.ud800'"),
        (("x" * 79, "y"), "accepted: x of 80 characters"),
        (("x" * 80, "yy"), "y of one"),
        (("x" * 80, 3), "y of one"),
    ],
)
def test_other_samples_are_refused_with_the_file(data: Path, sample: tuple, words: str) -> None:
    write_leaf(data, {"A_B": [("x" * 80, "y")]}, "test")
    file = write_leaf(data, {"A_B": [("x" * 80, "y"), sample]}, "train")
    with pytest.raises(KeelError, match=words) as refused:
        leaf_pool(data)
    assert str(file) in str(refused.value)


def test_leaf_s_folders_are_asked_for(data: Path) -> None:
    with pytest.raises(KeelError, match=r"train' has no \*\.json; accepted: the files that https"):
        shakespeare.shakespeare(source="leaf")


@pytest.mark.parametrize(
    ("fraction", "users", "train", "test"), [(0.9, 660, 3_678_451, 356_921), (0.8, 799, 3_335_126, 771_050)]
)
def test_gutenberg_s_text_gives_leaf_s_numbers(fraction: float, users: int, train: int, test: int) -> None:
    folder = os.environ.get("KEEL_DATA")
    if folder is None or not (Path(folder) / shakespeare.FILE).is_file():
        pytest.skip(f"needs {shakespeare.FILE} in KEEL_DATA")
    pool = shakespeare.shakespeare(fraction=fraction)
    assert pool.rows is not None
    assert pool.keys is not None
    assert pool.test_keys is not None
    assert (len(pool.rows), len(pool.keys), len(pool.test)) == (train, train, test)
    assert len(np.unique(pool.keys)) == len(np.unique(pool.test_keys)) == users
    assert decoded(pool.train.inputs[0]) == SPEECH[:80]
    assert decoded(pool.train.targets[:20]) == SPEECH[80:100]


SPEECH = "In delivering my son from me, I bury a second husband. What hope is there of his Majesty's amendment? This"
