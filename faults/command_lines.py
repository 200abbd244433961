"""Random command lines of every command: exit code 0, 1 or 2; bad input prints one line and writes nothing."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from math import inf
from pathlib import Path
from random import Random
from shlex import join
from shutil import copytree
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import typer

import keel
from faults._hostile import CONTROL, FLOATS, LARGE, REFERENCES, TEXTS, assignments
from faults._limits import Exceeded, limited
from faults.specs import LONGEST, as_text
from keel.algorithms import REGISTRY
from keel.cli import app, main

ENDS = {  # options that end a command before it computes for long, or that it is never called without
    ("run",): ["--dry-run"],
    ("compare",): ["--dry-run"],
    ("sweep",): ["--dry-run"],
    ("campaign",): ["--hours", "-1"],
    ("paper", "run"): ["--seeds", "0"],
    ("paper", "list"): ["--unknown"],
    ("demo",): ["--seeds", "0"],
    ("deploy", "approve"): ["--yes"],
    ("deploy", "check"): ["--rounds", "0"],
}
SHORT_RUN = ["--rounds", "1", "--engine", "serial", "--set", "local.steps=1", "--clients", "10"]
PATHS = [
    "small.toml",
    "broken.toml",
    "run",
    "file",
    "empty",
    "missing",
    "file/below",
    "empty/new",
    "é\n",
    "a" * 300,
    ".",
]
NAMES = [
    *REGISTRY,
    "digits",
    "arrays",
    "mlp",
    "lenet",
    "serial",
    "cohort",
    "iid",
    "0.5",
    "fedavg,ghbm",
    "100,101",
    "main",
]
CHILDREN = 200
"""One in so many lines runs as a process of its own."""


def check(seed: int, folder: Path) -> str | None:
    rng, work = Random(seed), folder / "work"
    line = random_line(rng)
    prepare(work, line)
    before = sorted(work.rglob("*"))
    call = call_child if seed % CHILDREN == 0 else call_here
    with patch.dict(os.environ, KEEL_DATA=str(work / "data"), HOME=str(work)):
        try:
            code, out, err = call(work, line)
        except Exceeded as exceeded:
            return f"keel {join(line)}: {exceeded}"
    fault = None
    if code not in (0, 1, 2):
        fault = f"exit code {code}"
    elif "Traceback" in out + err:
        fault = "a traceback"
    elif code == 2 and (not err.startswith("keel: ") or err.count("\n") != 1 or len(err) > LONGEST or out):
        fault = f"not one line on standard error, but {err[:300]!r}"
    elif code == 2 and sorted(work.rglob("*")) != before:
        fault = f"bad input has written {sorted({*work.rglob('*')} - {*before})}"
    elif sorted(folder.iterdir()) != [work]:
        fault = "it has written outside its folder"
    return None if fault is None else f"keel {join(line)}: {fault}"


def random_line(rng: Random) -> list[str]:
    """A command with some of its options, of which one in a few has a value that it cannot have."""
    name, command = rng.choice(list(commands()))
    words = []
    for parameter in command.params:
        if parameter.param_type_name == "argument" and (parameter.required or rng.random() < 0.5):
            words.append(
                [value_of(parameter, rng) for _ in range(rng.choice([1, 1, 1, 2]) if parameter.nargs < 0 else 1)]
            )
        elif parameter.param_type_name == "option" and rng.random() < 0.15:
            option = rng.choice(parameter.opts)
            words.append([option] if parameter.is_flag else [option, value_of(parameter, rng)])
    rng.shuffle(words)
    line = [word for group in words for word in group]
    if rng.random() < 0.1:
        line.insert(rng.randrange(len(line) + 1), rng.choice(["--unknown", "-x", "extra", "", "--set", "-h", "é"]))
    end = SHORT_RUN if name == ("run",) and rng.random() < 0.1 else ENDS.get(name, [])
    return [*name, *line, *end]


def value_of(parameter: Any, rng: Random) -> str:
    """A value of a parameter, valid as often as not."""
    kind = parameter.type.name
    if parameter.metavar and "=" in parameter.metavar:
        chosen = assignments(rng, python=False)
        return "" if not chosen else f"{chosen[0][0]}={as_text(chosen[0][1], rng)}".replace("\0", "")
    if kind in ("path", "file", "directory"):
        return rng.choice(PATHS)
    if kind.startswith(("integer", "float")):
        return str(rng.choice([0, 1, 2, 3, 10, 0.1, 0.5, -1, *LARGE, *FLOATS, *TEXTS]))
    if kind == "choice":
        return rng.choice([*parameter.type.choices, "x", ""])
    return rng.choice(rng.choice([NAMES, NAMES, TEXTS, REFERENCES, [text.replace("\0", "") for text in CONTROL]]))


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its name."""
    return walk((), typer.main.get_command(app))


def walk(name: tuple[str, ...], group: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk((*name, word), command)
        else:
            yield (*name, word), command


def prepare(work: Path, line: list[str]) -> None:
    """Make the files that a command line may name."""
    (work / "empty").mkdir(parents=True)
    (work / "file").write_text("text")
    (work / "small.toml").write_text("rounds = 1\n[data]\nclients = 10\n")
    (work / "broken.toml").write_text("rounds = [")
    if "run" in line[1:]:
        copytree(finished_run(), work / "run")


@cache
def finished_run() -> Path:
    """A run that is copied into the folders of the cases."""
    path = Path(mkdtemp(prefix="keel-fault-")) / "run"
    keel.run({"rounds": 1, "data": {"clients": 10}, "engine": {"name": "serial"}}, out=path)
    return path


def call_here(work: Path, line: list[str]) -> tuple[Any, str, str]:
    out, err = StringIO(), StringIO()
    with chdir(work), patch.object(sys, "argv", ["keel", *line]), redirect_stdout(out), redirect_stderr(err):
        try:
            # the charts of a report reserve terabytes of address space
            with limited(60, gigabytes=inf if line[0] == "report" else 6), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                main()
        except SystemExit as ended:
            return ended.code, out.getvalue(), err.getvalue()
    return None, out.getvalue(), err.getvalue()


def call_child(work: Path, line: list[str]) -> tuple[Any, str, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "keel", *line], cwd=work, capture_output=True, text=True, timeout=300, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr
