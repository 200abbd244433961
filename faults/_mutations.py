"""Random damage to the content of a file or message."""

from random import Random

TOKENS = (
    b"nan", b"-inf", b"1e999", b"-1", b"-0", b"0", b"9" * 30, b"9" * 5000, b"1.5", b"true", b"null", b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf", b"\\ud800", b"\xed\xa0\x80", b"\n", b"\r",
    b'"', b"'", b",", b":", b"{", b"[" * 3000, b"](", b"../../",
    b"/etc/passwd", b"x" * 3000, b"\xf0\x9f\x98\x80", b"(1,)", b"'|O'", b"\x80\x04", b"[]", b"{}", b"\\n",
    b"\xc2\xb2",
)  # fmt: skip
"""Texts that readers may trip over: numbers out of range, quotes, encodings, nesting, paths."""
NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**40,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
"""Sizes and offsets that a binary header may declare."""


def damaged(rng: Random, content: bytes) -> bytes:
    """Return the content with one to four changes of random kinds and places."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(CHANGES)(rng, changed)
    return bytes(changed)


def _flip(rng: Random, content: bytearray) -> None:
    if content:
        content[_place(rng, content)] ^= 1 << rng.randrange(8)


def _overwrite(rng: Random, content: bytearray) -> None:
    if content:
        content[_place(rng, content)] = rng.randrange(256)


def _insert(rng: Random, content: bytearray) -> None:
    at = _place(rng, content)
    content[at:at] = rng.randbytes(rng.choice((1, 4, 40)))


def _delete(rng: Random, content: bytearray) -> None:
    at = _place(rng, content)
    del content[at : at + rng.choice((1, 4, 40, 400))]


def _truncate(rng: Random, content: bytearray) -> None:
    del content[_place(rng, content) :]


def _repeat(rng: Random, content: bytearray) -> None:
    at, length = _place(rng, content), rng.choice((1, 8, 100))
    content[at:at] = content[at : at + length] * rng.choice((1, 2, 50))


def _number(rng: Random, content: bytearray) -> None:
    size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    at = _place(rng, content)
    content[at : at + size] = (rng.choice(NUMBERS) % 256**size).to_bytes(size, order)


def _token(rng: Random, content: bytearray) -> None:
    at = _place(rng, content)
    content[at : at + rng.choice((0, 1, 3))] = rng.choice(TOKENS)


def _digit(rng: Random, content: bytearray) -> None:
    """Change a decimal digit, so that text stays well-formed."""
    places = [i for i, byte in enumerate(content[:2000]) if 48 <= byte <= 57]
    if places:
        content[rng.choice(places)] = rng.choice(b"0123456789-.e")


CHANGES = (_flip, _overwrite, _insert, _delete, _truncate, _repeat, _number, _token, _token, _digit)


def _place(rng: Random, content: bytearray) -> int:
    """Return a position, half of the time near the beginning, where formats have their headers."""
    last = max(0, len(content) - 1)
    return rng.randint(0, min(last, 128) if rng.random() < 0.5 else last)
