"""Kills (SIGKILL) of sites and of the SuperLink of a real federation of three sites, which all cases share.

A killed process is started again, and after a kill of the server the same Flower run. It ends in the bits of `serial`.
A case takes a minute or more, since Flower starts a process for each message.
"""

import atexit
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pytest

from faults._tally import injected
from keel.runs.folder import RunFolder
from tests.deploy import federated_app
from tests.deploy.in_process import run_serial
from tests.deploy.processes import OFFLINE_SECONDS, Federation
from tests.deploy.three_sites import EXPERIMENT, SITES, new_three_sites, start_node, start_three_sites

METHOD = "fedhbm"
"""The first method of the app; its clients have state."""
TIMEOUT = 300
"""Seconds until a reply is missing: a busy machine takes a minute to start the process that answers."""
ATTEMPTS = 3


@cache
def federation() -> Federation:
    made = new_three_sites(Path(mkdtemp(prefix="keel-federation-")) / "three-sites")
    atexit.register(made.close)
    start_three_sites(made)
    return made


@cache
def undisturbed() -> tuple[list[dict[str, Any]], str]:
    config = federated_app.method_config(EXPERIMENT, METHOD, "unused")
    serial = run_serial(Path(mkdtemp(prefix="keel-undisturbed-")) / "run", **config)
    return _records(serial.records), serial.summary["model_sha256"]


def check(seed: int, folder: Path) -> str | None:
    rng, shared = Random(seed), federation()
    shared.runs = folder / "runs"
    try:
        _run(shared)
        for victim in rng.choice([["site"], ["server"], ["site", "server"], ["site", "site"]]):
            rounds = rng.randrange(2)
            shared.wait_until(lambda rounds=rounds: len(shared.records(METHOD)) >= rounds, f"{rounds} rounds")
            time.sleep(rng.uniform(0, 10))
            (_kill_server if victim == "server" else _kill_site)(shared, rng)
            injected["kills"] += 1
        _finish(shared)
    except pytest.fail.Exception as failed:
        return str(failed).splitlines()[0]
    run = RunFolder(shared.runs / METHOD)
    found = _records(run.records()), (run.summary or {})["model_sha256"]
    return None if found == undisturbed() else "other bits than those of serial"


def _finish(shared: Federation) -> None:
    """Wait for the end. A run that had too few replies says so and ends; the same Flower run resumes it."""
    for _ in range(ATTEMPTS):
        with suppress(pytest.fail.Exception):
            return shared.wait_until(lambda: shared.ended("mimemom"), "the end of both methods", during_run=True)
        _run(shared)
    pytest.fail(f"it does not end in {ATTEMPTS} Flower runs")


def _kill_site(shared: Federation, rng: Random) -> None:
    site = rng.randrange(SITES)
    shared.kill(f"site-{site}")
    time.sleep(OFFLINE_SECONDS)  # the SuperLink accepts it again after that
    start_node(shared, site)


def _kill_server(shared: Federation, rng: Random) -> None:
    shared.kill("server")
    shared.start_server()
    for site in range(SITES):
        shared.stop_node(site)
        start_node(shared, site)
    _run(shared)


def _run(shared: Federation) -> None:
    shared.run("-c", f'federation.out="{shared.runs}" federation.timeout_seconds={TIMEOUT}')


def _records(records: list[Any]) -> list[dict[str, Any]]:
    """The records without the bytes, which count a request that is sent again."""
    return [{name: value for name, value in record.items() if name != "bytes_down"} for record in records]
