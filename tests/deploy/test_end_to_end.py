"""A SuperLink and three SuperNodes on this machine, with TLS and keys, as `keel deploy new` sets them up."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Message

from keel.deploy.check import OneProcess
from keel.deploy.credentials import make_certificates, make_node_key
from keel.deploy.new import new_federation
from keel.deploy.server import run_federation
from keel.deploy.settings import read_settings
from keel.deploy.site import client_app
from keel.runs.folder import RunFolder
from keel.runs.run import Run
from tests.deploy import federated_app
from tests.deploy.in_one_process import CONFIG, serial

BIN = Path(sys.executable).parent
PATIENCE = 400
SITES = 3
ROUNDS = {"fedhbm": 3, "scaffold": 2, "mimemom": 2, "ghbm": 3}
SETTINGS = {"ghbm": {"algorithm.tau": 1}}
"""So that GHBM has a momentum from the second round on."""


class Federation:
    """The processes of a federation, each the first of its own group."""

    def __init__(self, folder: Path):
        self.folder, self.runs = folder, folder / "runs"
        self.port, *self.node_ports = _free_ports(1 + SITES)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.last_run = ""
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "FLWR_HOME": str(folder / ".flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
        }

    def start(self, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [*map(str, command)],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def start_server(self) -> None:
        self.start("server", "./start_server.sh")
        self.until(lambda: _answers(self.port), "the server answers")

    def start_node(self, site: int) -> None:
        self.environment["NODE_PORT"] = str(self.node_ports[site])
        settings = f'device="cpu" spoil="{self.folder}/spoil-{site}"'
        self.start(f"site-{site}", "./start_site.sh", str(site), f"127.0.0.1:{self.port}", settings)

    def stop_node(self, site: int) -> None:
        """As an administrator does; a kill is another thing."""
        process = self.processes.pop(f"site-{site}")
        process.terminate()
        process.wait(PATIENCE)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        _kill_family(process.pid)
        process.wait()

    def flwr(self, *words: str) -> str:
        done = subprocess.run(
            ["flwr", *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, **config: Any) -> None:
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        told = json.loads(
            self.flwr("run", ".", "federation", "--format", "json", *(["-c", settings] if settings else []))
        )
        assert told["success"], told
        self.last_run = str(told["run-id"])

    def records(self, name: str) -> list[dict[str, Any]]:
        return RunFolder(self.runs / name).records() if (self.runs / name / "metrics.jsonl").exists() else []

    def ended(self, name: str) -> bool:
        return (self.runs / name / "model.safetensors").exists()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > limit:
                told = self.flwr("log", self.last_run, "federation", "--show") if self.last_run else ""
                pytest.fail(f"{what}: not in {PATIENCE} s\n{self.logs()}\nthe run:\n{told}")
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()[-4000:]}" for file in self.folder.glob("*.log"))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation") / "three-sites"
    new_federation(folder, SITES, "fedhbm")
    package = folder / "three_sites"
    shutil.copy(federated_app.__file__, package / "task.py")
    (package / "server.py").write_text("from three_sites.task import server\n\napp = server\n")
    (package / "client.py").write_text("from three_sites.task import client\n\napp = client\n")
    there = Federation(folder)
    configured = (folder / "pyproject.toml").read_text().split("[tool.flwr.app.config]")[0]
    lines = [f"{key} = {json.dumps(value)}" for key, value in config(there.runs).items()]
    (folder / "pyproject.toml").write_text(configured + "[tool.flwr.app.config]\n" + "\n".join(lines) + "\n")
    connection = folder / ".flwr" / "config.toml"
    connection.write_text(connection.read_text().replace("8000", str(there.port)))
    make_certificates(folder / "certificates", ["127.0.0.1"])
    try:
        there.start_server()
        for site in range(SITES):
            public = make_node_key(folder / "keys" / f"site-{site}")
            there.flwr("supernode", "register", str(public), "federation")
            there.start_node(site)
        yield there
    finally:
        there.stop()


def config(runs: Path) -> dict[str, Any]:
    own = {"methods": ",".join(ROUNDS), "algorithm.tau": 1, "evaluation.every": 100, "evaluation.last": 1, "seed": 3}
    place = {"federation.out": str(runs), "federation.timeout": 120, "federation.wait": 600, "federation.least": 1}
    return {**CONFIG, **own, **place}


def test_four_methods_have_the_bits_of_serial_though_a_node_and_the_server_are_killed(
    federation: Federation, tmp_path: Path
) -> None:
    expected = {}
    for name, rounds in ROUNDS.items():
        settings = {"algorithm.name": name, "rounds": rounds, **SETTINGS.get(name, {})}
        settings |= {"evaluation.every": 100, "evaluation.last": 1, "seed": 3}
        expected[name] = serial(tmp_path / name, **settings)
    cohorts = [set(record["cohort"]) for record in expected["fedhbm"].records]
    (idle,) = set(range(SITES)) - cohorts[1]
    assert idle in cohorts[0] & cohorts[2], "another seed: one site takes part in rounds 1 and 3 and not in 2"
    federation.run()
    federation.until(lambda: len(federation.records("fedhbm")) == 1, "a round")
    federation.stop_node(idle)  # between its rounds: it comes back, and finds its memory
    federation.start_node(idle)
    federation.until(lambda: len(federation.records("ghbm")) == 1, "the first round of the last method")
    federation.kill("server")  # in the middle of the second; its nodes and its state are in the database
    federation.start_server()
    federation.run()
    federation.until(lambda: federation.ended("ghbm"), "the end of the run that was gone on with")
    for name, run in expected.items():
        folder = RunFolder(federation.runs / name)
        assert folder.records() == run.records, name
        assert (folder.summary or {})["model_sha256"] == run.summary["model_sha256"], name
    assert "lost its memory" not in federation.logs()
    assert list((federation.folder / "memory" / f"site-{idle}").glob("*/memory-3.safetensors"))


def test_a_node_killed_in_a_round_comes_back_to_it_and_one_that_sends_nan_is_set_aside(
    federation: Federation, tmp_path: Path
) -> None:
    spoiled = federation.folder / "spoil-2"
    spoiled.touch()
    settings: dict[str, Any] = {"methods": "fedhbm", "federation.out": str(federation.runs / "hurt")}
    settings |= {"participation.rate": 1.0, "federation.least": 2}
    federation.run(**settings)
    federation.until(lambda: len(federation.records("hurt/fedhbm")) == 1, "a round")
    before = federation.log("site-1").count("Received successfully")
    federation.until(lambda: federation.log("site-1").count("Received successfully") > before, "the next message")
    federation.kill("site-1")
    federation.start_node(1)
    federation.until(lambda: federation.ended("hurt/fedhbm"), "the end")
    spoiled.unlink()
    records = federation.records("hurt/fedhbm")
    aside = [record["set_aside"]["2"] for record in records]
    assert [reason.startswith("delta is not finite") for reason in aside] == [True] * 3
    assert "lost its memory" not in federation.logs()
    replayed = _replayed(federation, tmp_path, settings)
    summary = RunFolder(federation.runs / "hurt/fedhbm").summary or {}
    assert summary["model_sha256"] == replayed.summary["model_sha256"]


def test_unknown_keys_and_wrong_authorities_are_refused(federation: Federation, tmp_path: Path) -> None:
    stranger = make_node_key(tmp_path / "stranger").with_suffix("")
    make_certificates(tmp_path / "other", ["127.0.0.1"])
    known, ours = federation.folder / "keys" / "site-1", federation.folder / "certificates"
    for name, key, ca in ("stranger", stranger, ours), ("misled", known, tmp_path / "other"):
        federation.start(
            name,
            *("flower-supernode", "--superlink", f"127.0.0.1:{federation.port}", "--max-retries", "1"),
            *("--port", str(_free_ports(1)[0]), "--root-certificates", ca / "ca.crt"),
            *("--auth-supernode-private-key", key),
        )
    nodes = [federation.processes["stranger"], federation.processes["misled"]]
    federation.until(lambda: all(node.poll() is not None for node in nodes), "both give up")
    assert all(node.returncode != 0 for node in nodes)
    assert "No SuperNode found with the given public key" in federation.log("server")
    assert "certificate" in federation.log("misled").lower()


def _replayed(federation: Federation, tmp_path: Path, settings: dict[str, Any]) -> Run:
    """The same training in one process, in which site 2 is silent."""

    def post(node: int, reply: Message) -> Message | None:
        return None if node == 3 and reply.metadata.message_type == "train" else reply

    table = {**config(tmp_path), **settings, "algorithm.name": "fedhbm", "federation.out": str(tmp_path / "replayed")}
    table["rounds"] = ROUNDS["fedhbm"]
    for name in "methods", "algorithm.tau":
        del table[name]
    spec, known = read_settings({**table, "federation.timeout": 0.1, "federation.wait": 1})
    nodes = [{"site": site, "memory": str(tmp_path / f"site-{site}")} for site in range(SITES)]
    app = client_app(federated_app.model, federated_app.site_data)
    return run_federation(OneProcess(app, nodes, post), spec, known, federated_app.model, federated_app.test)


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _kill_family(parent: int) -> None:
    """The process and those that it started, and those that they did: Flower's are in groups of their own."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        pid, ppid = map(int, line.split())
        children.setdefault(ppid, []).append(pid)
    family, new = [parent], [parent]
    while new:
        new = [child for pid in new for child in children.get(pid, [])]
        family += new
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by itself
            continue
