"""Random and damaged specs, from Python, TOML files, --set and sweeps. Each is valid, or refused in one line."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import tomli_w

from faults._data_folder import data_folder
from faults._hostile import assignments, put
from faults._limits import Exceeded, limited
from keel import KeelError
from keel.config.defaults import make_spec
from keel.config.overrides import override, read_spec
from keel.config.schema import Spec, resolved_spec
from keel.runs.build import build, make_task
from keel.runs.resources import footprint_of
from keel.runs.search_space import make_plan, parse_over

LONGEST = 2000
"""Characters that the longest useful error has: one that lists every known name."""
BUILT = 100
"""One in so many valid specs also has its task made and its footprint estimated."""
SHORT = [*"=[]{}\"'\n.,#\0\r\ufeffé\\", "[[", "]]", '"""', "\\u", "nan", "-inf", "1e400", "0x", "1_000", "2026-01-01"]
LONG = ["9" * 5000, "[" * 5000, "{a=" * 3000, "a." * 3000 + "b=1\n"]
RANGES = ["0..1", "1..1e400,log", "0.1..0.3,log", "1..9", "9..1", "1..99999999999999999999", "a..b"]


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    read = rng.choice([from_python, from_python, from_file, from_damaged_file, from_options, from_search])
    with data_folder(folder):
        return outcome(lambda: follow(read(rng, folder), rng))


def outcome(action: Callable[[], Any]) -> str | None:
    """What is wrong with the end of an action that may raise a KeelError."""
    try:
        with limited(seconds=20, gigabytes=6):
            action()
    except KeelError as error:
        return fault_of(str(error))
    except Exceeded as exceeded:
        return str(exceeded)
    return None


def fault_of(message: str) -> str | None:
    """What is wrong with an error message."""
    if not message.strip() or len(message.splitlines()) > 1 or len(message) > LONGEST or not message.isprintable():
        return f"the error is not one printable line of at most {LONGEST} characters: {message[:100]!r}"
    return None


def from_python(rng: Random, folder: Path) -> Spec:
    return make_spec(table(rng, python=True))


def from_file(rng: Random, folder: Path) -> Spec:
    return make_spec(read_spec(written(folder, tomli_w.dumps(table(rng)).encode())))


def from_damaged_file(rng: Random, folder: Path) -> Spec:
    text = tomli_w.dumps(table(rng)).encode()
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(text) + 1)
        inserted = fragment(rng).encode() if rng.random() < 0.7 else rng.randbytes(rng.choice([1, 4]))
        text = text[:at] + inserted + text[at + rng.choice([0, 0, 1, 5, 50]) :]
    return make_spec(read_spec(written(folder, text)))


def from_options(rng: Random, folder: Path) -> Spec:
    options = [f"{field}={as_text(value, rng)}" for field, value in assignments(rng, python=False)]
    return make_spec(override({}, options))


def from_search(rng: Random, folder: Path) -> Spec:
    """The spec of a sweep over some fields."""
    chosen = assignments(rng, python=False)
    over = [f"{field}={as_text(value, rng)},{as_text(value, rng)}" for field, value in chosen]
    if rng.random() < 0.3:
        over.append(f"{rng.choice(['local.lr', 'rounds', 'seed'])}={rng.choice(RANGES)}")
    search: dict[str, Any] = {"method": rng.choice(["grid", "random"]), "fields": parse_over(over)}
    search |= {"points": rng.choice([1, 3, 10**6])} if search["method"] == "random" else {}
    return make_plan({"search": search, **table(rng, python=False)}).base


def fragment(rng: Random) -> str:
    """A piece of text that damages what it is inserted into."""
    return rng.choice(LONG if rng.random() < 0.1 else SHORT)


def table(rng: Random, python: bool = False) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for field, value in assignments(rng, python):
        put(made, field, value)
    return made


def as_text(value: Any, rng: Random) -> str:
    """The value as a user might type it: as TOML, or as Python prints it, or damaged."""
    kind = rng.random()
    if kind < 0.5:
        return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()
    return str(value) if kind < 0.9 else str(value) + fragment(rng)


def written(folder: Path, content: bytes) -> Path:
    path = folder / "spec.toml"
    path.write_bytes(content)
    return path


def follow(spec: Spec, rng: Random) -> None:
    """What a command does with a valid spec before it trains."""
    again = resolved_spec(tomllib.loads(spec.to_toml()))
    assert again == spec, "the spec that is written is not the one that was read"
    assert spec.label
    assert spec.identity
    if rng.randrange(BUILT) == 0 and spec.engine.name in ("auto", "serial", "cohort"):
        engine = spec.engine.model_copy(update={"name": rng.choice(["serial", "cohort"])})  # auto would time itself
        spec = spec.model_copy(update={"engine": engine})
        footprint_of(build(spec, make_task(spec)))
