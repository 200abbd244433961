"""Reports on damaged and hostile run folders: each case changes some files of two of three runs.

The report must be made of what can be read, which includes the third run, and no text of a run may become HTML.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from datetime import date
from functools import cache
from math import inf, nan
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import tomli_w

import keel
from keel.report import tables
from keel.report.comparison import Comparison, compare
from keel.report.drawing import browser_script
from keel.report.explanations import difference_notes, explanation
from keel.report.page import page_html
from keel.report.sections import Section
from keel.runs.finding import find_runs

TAG = "<hostile"
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**400, 0.5, -0.5, 1e-320, 1e149, 1e308, -1e308, nan, inf, -inf),
    *(
        "",
        "x",
        "custom",
        "fedavg",
        f"{TAG} onerror=alert(1)>",
        f"</script>{TAG}>",
        "\ud800",
        "\x1b[31m\x00\r\n",
        "é" * 50,
    ),
    *("a-and-b", "loss", "rounds", "time", "../..", "os:system", "__proto__", "{{ 7 * 7 }}", "%s", "=cmd()"),
    *([], {}, [[]], [1, "x"], {"name": 1}, {f"{TAG}>": 1}, [0] * 300, date(2020, 1, 1)),
]
FILES = ["spec.toml", "environment.json", "summary.json", "data.json", "model.json", "metrics.jsonl", "timings.jsonl"]


@cache
def runs() -> Path:
    """The folder of three small runs."""
    folder = Path(mkdtemp(prefix="keel-fault-reports-"))
    table = {"rounds": 6, "local": {"steps": 1}, "evaluation": {"every": 2, "drift": True, "clients": 4}}
    for name, algorithm in ("a", "fedavg"), ("b", "fedavg"), ("c", "ghbm"):
        keel.run({**table, "seed": ord(name), "algorithm": {"name": algorithm}}, out=folder / name)
    return folder


def check(seed: int, folder: Path) -> str | None:
    rng = random.Random(seed)
    shutil.copytree(runs(), folder / "runs", ignore=shutil.ignore_patterns("checkpoint"))
    for _ in range(rng.randint(1, 4)):
        file = folder / "runs" / rng.choice("ab") / rng.choice(FILES)
        rng.choice([damage, mutate, mutate, mutate, replace])(file, rng)
    comparison = compare(find_runs([folder / "runs"]), skip_damaged=True)
    if folder / "runs" / "c" not in comparison.paths:
        return "the run that is not damaged is not in the report"
    print_tables(comparison)
    with patch.object(Section, "charts", Section.charts if seed % 20 == 0 else lambda part, live=False: {}):
        page = page_html(comparison, browser_script() if seed % 20 == 0 else "")
    page.encode()
    return "the page has a tag from a run" if TAG in page else None


def print_tables(comparison: Comparison) -> None:
    """Make everything that is printed, as text that a file can hold."""
    sheets = [*tables.results(comparison), *tables.results(comparison, interval=True), *tables.costs(comparison)]
    sheets += [*tables.client_metrics(comparison), *tables.other_metrics(comparison)]
    texts = [tables.text_of(sheet) for sheet in sheets]
    texts += [tables.csv_text(comparison), tables.markdown_text(comparison), tables.latex_text(comparison)]
    texts += [*difference_notes(comparison), explanation(comparison), *map(str, comparison.skipped)]
    texts.append(json.dumps(comparison.rows(), allow_nan=False))
    "\n".join(texts).encode()


def damage(file: Path, rng: random.Random) -> None:
    """Change bytes or lines."""
    if not file.is_file():
        return
    content = bytearray(file.read_bytes())
    begin, length = rng.randrange(len(content) + 1), rng.choice([1, 1, 1, 8, 100, 10_000])
    end, lines = begin + length, content.split(b"\n")
    change: Callable[[], bytes] = rng.choice(
        [
            lambda: bytes(content[:begin]),
            lambda: bytes(content[:begin] + content[end:]),
            lambda: bytes(content[:begin] + rng.randbytes(length) + content[end:]),
            lambda: bytes(content[:begin] + content[begin:end] + content[begin:]),
            lambda: b"\n".join(rng.sample(lines, len(lines))),
            lambda: b"\n".join(line for line in lines for _ in range(rng.choice([0, 1, 1, 1, 2]))),
        ]
    )
    file.write_bytes(change())


def replace(file: Path, rng: random.Random) -> None:
    """Put something else in the place of the file."""
    if file.is_file() or file.is_symlink():
        file.unlink()
    elif file.exists():
        return
    kind = rng.choice(["nothing", "empty", "folder", "loop", "dangling", "pipe", "deep", "other"])
    if kind == "empty":
        file.touch()
    elif kind == "folder":
        file.mkdir()
    elif kind in ("loop", "dangling"):
        file.symlink_to(file.name if kind == "loop" else "missing")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "deep":
        file.write_text(("x = " if file.suffix == ".toml" else "") + "[" * 100_000)
    elif kind == "other":
        shutil.copy(runs() / "c" / file.name, file)


def mutate(file: Path, rng: random.Random) -> None:
    """Change values of valid JSON or TOML."""
    if not file.is_file():
        return
    source = runs() / file.parent.name / file.name
    if file.suffix == ".toml":
        table = keel.config.overrides.read_spec(source)
        change_value(table, rng)
        try:
            file.write_text(tomli_w.dumps(table))
        except (TypeError, UnicodeEncodeError):  # TOML has no null and no lone surrogates
            file.write_text("")
        return
    lines = source.read_text().splitlines() if file.suffix == ".jsonl" else [source.read_text()]
    number = rng.randrange(len(lines))
    values = json.loads(lines[number])
    change_value(values, rng)
    lines[number] = json.dumps(values, default=str)
    file.write_text("\n".join(lines) + "\n")


def change_value(values: Any, rng: random.Random) -> None:
    """Replace, remove or add a value at any depth."""
    places = list(values) if isinstance(values, dict) else list(range(len(values)))
    below = [place for place in places if isinstance(values[place], dict | list) and values[place]]
    if below and rng.random() < 0.5:
        change_value(values[rng.choice(below)], rng)
    elif places and rng.random() < 0.8:
        place = rng.choice(places)
        if rng.random() < 0.25:
            del values[place]
        else:
            values[place] = rng.choice(HOSTILE)
    elif isinstance(values, dict):
        values[rng.choice([text for text in HOSTILE if isinstance(text, str)])] = rng.choice(HOSTILE)
    else:
        values.append(rng.choice(HOSTILE))
