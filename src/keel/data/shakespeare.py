"""Shakespeare by role (McMahan et al., 2017; Caldas et al., 2019): the character after each 80, by LEAF's rules.

All that is said lies in one array of characters, and the samples are views of it.
"""

import re
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from keel.data import leaf
from keel.data.federated import Examples, Pool
from keel.data.preparation import Tokens
from keel.data.store import data_folder, prepared
from keel.errors import KeelError

ADDRESS = "https://www.gutenberg.org/files/100/old/1994-01-100.zip"
HOW = f"100.txt of {ADDRESS} as shakespeare/gutenberg100.txt, or LEAF's train/ and test/ with data.source = 'leaf'"
FILE = "shakespeare/gutenberg100.txt"
VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
FRACTION = 0.8
ROLES, SAMPLES = 1_129, 4_226_158
"""LEAF's published numbers."""
LINES = "c05a4736a3fe7a0d294c125bdfdf96f4cf47d1dc4183b8647718b857c2038735"
"""SHA-256 of all that is said."""

_AUTHOR = "by William Shakespeare"
_END = 124_196  # of the plays: poems follow
_SPEECH, _MORE = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"    (.*)")
_UNINDENTED = "THE COMEDY OF ERRORS"
_UNINDENTED_SPEECH, _UNINDENTED_MORE = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"(.*)")
_OUTSIDE = 255
_NUMBERS = np.full(256, _OUTSIDE, dtype=np.uint8)
_NUMBERS[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))


def shakespeare(
    *, source: Literal["gutenberg", "leaf"] = "gutenberg", fraction: Annotated[float, Field(gt=0, lt=1)] = FRACTION
) -> Pool:
    """Next character of a role's lines: with four fifths to train on, 799 roles and 3,335,126 samples.

    LEAF's own json ("leaf") is split already; `fraction` is for Gutenberg's text.
    """
    if source == "leaf":
        if fraction != FRACTION:
            raise KeelError(f"data.fraction: {fraction} is for Gutenberg's text; LEAF's json is split already")
        return leaf.load("shakespeare", samples, len(VOCABULARY), Tokens())
    file = data_folder() / FILE
    if not file.is_file():
        raise KeelError(f"data: no file {str(file)!r}; accepted: 100.txt of {ADDRESS} under this name")

    def make(place: Path) -> dict[str, Any]:
        said = roles(read(file))
        found = len(said), sum(len(text) - LENGTH for text in said.values())
        if found != (ROLES, SAMPLES):
            raise KeelError(
                f"data: {str(file)!r} gives {found[0]:,} roles and {found[1]:,} samples by LEAF's rules; "
                f"accepted: {ROLES:,} and {SAMPLES:,}, as 100.txt of {ADDRESS} does"
            )
        if (digest := sha256("\n".join(said.values()).encode()).hexdigest()) != LINES:
            raise KeelError(f"data: {str(file)!r} gives other lines than Gutenberg's text (SHA-256 {digest})")
        arrays = windows([encode(text, file) for text in said.values()], fraction)
        if not len(arrays["test_keys"]):
            raise KeelError(f"data.fraction: {fraction} leaves no role a test sample; accepted: less")
        for name, array in arrays.items():
            np.save(place / f"{name}.npy", array)
        return {}

    stored = prepared("shakespeare", [file], {"fraction": fraction}, make)
    text, *test = (torch.from_numpy(stored.arrays[name]) for name in ("text", "test_inputs", "test_targets"))
    return Pool(
        Examples(text[:-1].unfold(0, LENGTH, 1), text[LENGTH:]),
        Examples(*test),
        len(VOCABULARY),
        keys=stored.arrays["keys"],
        test_keys=stored.arrays["test_keys"],
        rows=stored.arrays["rows"],
        prepare=Tokens(),
        sha256=stored.sha256,
    )


def read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise KeelError(f"data: {str(file)!r} is damaged or no text ({error}); accepted: {ADDRESS}") from error


def roles(text: str) -> dict[str, str]:
    """What each role of each play says, if that is more than two lines and one sample."""
    said: dict[str, list[str]] = defaultdict(list)
    for title, parts in plays(text):
        if len(parts) > 1:  # else it is no play
            for role, lines in parts.items():
                if len(lines) > 2:
                    said[re.sub(r"\W+", "_", f"{title}_{role}".replace(" ", "_"))] += lines
    joined = {role: re.sub("  +", " ", "".join(f"{line} " for line in lines)) for role, lines in said.items()}
    return {role: text for role, text in joined.items() if len(text) > LENGTH}


def plays(text: str) -> list[tuple[str, dict[str, list[str]]]]:
    """Each play's title, and its roles with their lines. The poems before the plays and after are left out."""
    lines = text.splitlines()[1:_END]  # LEAF does not look at the first
    authors = [number for number, line in enumerate(lines) if _AUTHOR in line][1:]  # the first is the sonnets'
    found: list[tuple[str, dict[str, list[str]]]] = []
    for start, end in zip(authors, [*authors[1:], len(lines)], strict=True):
        above = [line.strip() for line in reversed(lines[max(0, start - 7) : start - 1])]
        title = next(filter(None, above), "")
        found.append((title, speeches(lines[start + 1 : end], title == _UNINDENTED)))
    return found


def speeches(lines: list[str], unindented: bool) -> dict[str, list[str]]:
    """The lines of each role of a play."""
    speech, more = (_UNINDENTED_SPEECH, _UNINDENTED_MORE) if unindented else (_SPEECH, _MORE)
    said: dict[str, list[str]] = defaultdict(list)
    role = None
    for line in lines:
        if match := speech.match(line):
            role = match[1].upper()
            if unindented and role.startswith("ACT "):
                role = None
            else:
                said[role].append(match[2])
        elif role and (match := more.match(line)):
            if unindented and match[1].startswith("<"):  # a stage direction
                role = None
            else:
                said[role].append(match[1])
    return said


def windows(texts: list[np.ndarray], fraction: float) -> dict[str, np.ndarray]:
    """The text of all roles, the rows where training samples start, and the test samples; keys number the roles.

    The first samples of a role train and the last test; those between, which share characters with both, are left
    out, and so are roles without a test sample.
    """
    lengths = np.array([len(text) for text in texts])
    starts = np.cumsum(lengths) - lengths
    samples = lengths - LENGTH
    cut = np.maximum(1, (fraction * samples).astype(np.int64))
    tested = np.maximum(0, samples - (cut + LENGTH - 1))
    trained = np.where(tested > 0, cut, 0)
    text = np.concatenate(texts)
    rows = _ranges(starts, trained)
    test_rows = _ranges(starts + samples - tested, tested)
    roles = np.arange(len(texts), dtype=np.int32)
    return {
        "text": text,
        "rows": rows,
        "keys": np.repeat(roles, trained),
        "test_inputs": np.lib.stride_tricks.sliding_window_view(text, LENGTH)[test_rows],
        "test_targets": text[test_rows + LENGTH],
        "test_keys": np.repeat(roles, tested),
    }


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])


def samples(x: list[Any], y: list[Any], file: Path) -> tuple[np.ndarray, np.ndarray]:
    """A user's samples in LEAF's json."""
    for texts, length in (x, LENGTH), (y, 1):
        if not all(isinstance(text, str) and len(text) == length for text in texts):
            raise KeelError(f"data: {str(file)!r} has other samples; accepted: x of {LENGTH} characters, y of one")
    return encode("".join(x), file).reshape(-1, LENGTH), encode("".join(y), file)


def encode(text: str, file: Path) -> np.ndarray:
    """Characters as their places in the vocabulary."""
    numbers = _NUMBERS[np.minimum(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4"), _OUTSIDE)]
    outside = np.flatnonzero(numbers == _OUTSIDE)
    if len(outside):
        raise KeelError(f"data: {str(file)!r} has the character {text[outside[0]]!r}; accepted: {VOCABULARY!r}")
    return numbers
