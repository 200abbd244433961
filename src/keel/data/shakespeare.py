"""Shakespeare by role (McMahan et al., 2017; Caldas et al., 2019): predict the character after 80, by LEAF's rules.

The lines of all roles are one array of characters, and the samples are views of it.
"""

import re
from collections import defaultdict
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from keel.core.examples import Examples
from keel.data import leaf
from keel.data.catalog_entry import CatalogEntry
from keel.data.dataset import Dataset
from keel.data.store import data_folder, prepared
from keel.data.transforms import Tokens
from keel.errors import KeelError, shown

ADDRESS = "https://www.gutenberg.org/files/100/old/1994-01-100.zip"
SOURCES = f"100.txt of {ADDRESS} as shakespeare/gutenberg100.txt, or LEAF's train/ and test/ with data.source = 'leaf'"
FILE = "shakespeare/gutenberg100.txt"
VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
FRACTION = 0.8
ROLES, SAMPLES = 1_129, 4_226_158
"""The numbers that LEAF publishes."""
LINES_SHA256 = "c05a4736a3fe7a0d294c125bdfdf96f4cf47d1dc4183b8647718b857c2038735"
"""SHA-256 of the lines of all roles."""

_AUTHOR = "by William Shakespeare"
_END = 124_196  # the last line of the plays; poems follow
_SPEECH, _CONTINUATION = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"    (.*)")
_UNINDENTED = "THE COMEDY OF ERRORS"
_UNINDENTED_SPEECH, _UNINDENTED_CONTINUATION = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"(.*)")
_OUTSIDE = 255
_NUMBERS = np.full(256, _OUTSIDE, dtype=np.uint8)
_NUMBERS[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))


def shakespeare(
    *, source: Literal["gutenberg", "leaf"] = "gutenberg", fraction: Annotated[float, Field(gt=0, lt=1)] = FRACTION
) -> Dataset:
    """Next character of a role's lines; 799 roles and 3,335,126 training samples with a training fraction of 0.8.

    `fraction` applies to Gutenberg's text; LEAF's JSON files ("leaf") are already split.
    """
    if source == "leaf":
        if fraction != FRACTION:
            raise KeelError(
                f"data.fraction = {fraction} requires data.source = 'gutenberg': LEAF's files are already split"
            )
        return leaf.load("shakespeare", samples, len(VOCABULARY), Tokens())
    file = data_folder() / FILE
    if not file.is_file():
        raise KeelError(f"data: file {str(file)!r} does not exist; save 100.txt of {ADDRESS} under this name")

    def make(folder: Path) -> dict[str, Any]:
        lines = roles(read(file))
        counts = len(lines), sum(len(text) - LENGTH for text in lines.values())
        if counts != (ROLES, SAMPLES):
            raise KeelError(
                f"data: {str(file)!r} must give {ROLES:,} roles and {SAMPLES:,} samples by LEAF's rules "
                f"(got {counts[0]:,} and {counts[1]:,}); use 100.txt of {ADDRESS}"
            )
        if (digest := sha256("\n".join(lines.values()).encode()).hexdigest()) != LINES_SHA256:
            raise KeelError(
                f"data: {str(file)!r} has other lines than Gutenberg's text (SHA-256 {digest}); "
                f"use 100.txt of {ADDRESS}"
            )
        arrays = windows([encode(text, file) for text in lines.values()], fraction)
        if not len(arrays["test_keys"]):
            raise KeelError(f"data.fraction: {fraction} leaves no test samples; use a smaller fraction")
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return {}

    stored = prepared("shakespeare", [file], {"fraction": fraction}, make)
    text, *test = (torch.from_numpy(stored.arrays[name]) for name in ("text", "test_inputs", "test_targets"))
    return Dataset(
        Examples(text[:-1].unfold(0, LENGTH, 1), text[LENGTH:]),
        Examples(*test),
        len(VOCABULARY),
        keys=stored.arrays["keys"],
        test_keys=stored.arrays["test_keys"],
        rows=stored.arrays["rows"],
        transform=Tokens(),
        sha256=stored.sha256,
    )


ENTRY = CatalogEntry(  # Gutenberg's text, or LEAF's folders
    shakespeare, natural=True, files=("shakespeare/*",), address=SOURCES
)


def read(file: Path) -> str:
    """Read the text."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise KeelError(f"data: {str(file)!r} is damaged or not a text ({error}); use 100.txt of {ADDRESS}") from error


def roles(text: str) -> dict[str, str]:
    """Return the lines of each role of each play as one text, if they are more than two and give a sample."""
    spoken: dict[str, list[str]] = defaultdict(list)
    for title, parts in plays(text):
        if len(parts) > 1:  # otherwise it is not a play
            for role, lines in parts.items():
                if len(lines) > 2:
                    spoken[re.sub(r"\W+", "_", f"{title}_{role}".replace(" ", "_"))] += lines
    joined = {role: re.sub("  +", " ", "".join(f"{line} " for line in lines)) for role, lines in spoken.items()}
    return {role: text for role, text in joined.items() if len(text) > LENGTH}


def plays(text: str) -> list[tuple[str, dict[str, list[str]]]]:
    """Return the title and the roles with their lines of each play, without the poems before and after the plays."""
    lines = text.splitlines()[1:_END]  # LEAF skips the first line
    authors = [number for number, line in enumerate(lines) if _AUTHOR in line][1:]  # the first belongs to the sonnets
    result: list[tuple[str, dict[str, list[str]]]] = []
    for start, end in pairwise([*authors, len(lines)]):
        above = [line.strip() for line in reversed(lines[max(0, start - 7) : start - 1])]
        title = next(filter(None, above), "")
        result.append((title, speeches(lines[start + 1 : end], title == _UNINDENTED)))
    return result


def speeches(lines: list[str], unindented: bool) -> dict[str, list[str]]:
    """Return the lines of each role of a play."""
    patterns = (_UNINDENTED_SPEECH, _UNINDENTED_CONTINUATION) if unindented else (_SPEECH, _CONTINUATION)
    speech, continuation = patterns
    spoken: dict[str, list[str]] = defaultdict(list)
    role = None
    for line in lines:
        if match := speech.match(line):
            role = match[1].upper()
            if unindented and role.startswith("ACT "):
                role = None
            else:
                spoken[role].append(match[2])
        elif role and (match := continuation.match(line)):
            if unindented and match[1].startswith("<"):  # a stage direction
                role = None
            else:
                spoken[role].append(match[1])
    return spoken


def windows(texts: list[np.ndarray], fraction: float) -> dict[str, np.ndarray]:
    """Return the text of all roles, the rows where training samples start, the test samples, and the role of each.

    The first samples of a role are for training, the last for testing. Those between share characters with both and
    are left out; so are roles without a test sample.
    """
    lengths = np.array([len(text) for text in texts])
    starts = np.cumsum(lengths) - lengths
    samples = lengths - LENGTH
    cut = np.maximum(1, (fraction * samples).astype(np.int64))
    test_counts = np.maximum(0, samples - (cut + LENGTH - 1))
    train_counts = np.where(test_counts > 0, cut, 0)
    text = np.concatenate(texts)
    rows = _ranges(starts, train_counts)
    test_rows = _ranges(starts + samples - test_counts, test_counts)
    roles = np.arange(len(texts), dtype=np.int32)
    return {
        "text": text,
        "rows": rows,
        "keys": np.repeat(roles, train_counts),
        "test_inputs": np.lib.stride_tricks.sliding_window_view(text, LENGTH)[test_rows],
        "test_targets": text[test_rows + LENGTH],
        "test_keys": np.repeat(roles, test_counts),
    }


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])


def samples(x: list[Any], y: list[Any], file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Encode a user's samples of LEAF's JSON files."""
    for texts, length in (x, LENGTH), (y, 1):
        for text in texts:
            if not (isinstance(text, str) and len(text) == length):
                raise KeelError(
                    f"data: {str(file)!r} must have x of {LENGTH} characters and y of one (got {shown(text)})"
                )
    return encode("".join(x), file).reshape(-1, LENGTH), encode("".join(y), file)


def encode(text: str, file: Path) -> np.ndarray:
    """Encode characters as their positions in the vocabulary."""
    numbers = _NUMBERS[np.minimum(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4"), _OUTSIDE)]
    outside = np.flatnonzero(numbers == _OUTSIDE)
    if len(outside):
        raise KeelError(f"data: {str(file)!r} must have only characters of {VOCABULARY!r} (got {text[outside[0]]!r})")
    return numbers
