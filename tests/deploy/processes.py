"""The processes of a real federation on this machine: a SuperLink, the proxy and SuperNodes, started by the template's
scripts. Without nginx there is no proxy, and the nodes connect to the SuperLink.

Ports: the federation takes a block of PORTS_PER_BLOCK free ports of 127.0.0.1 between FIRST_PORT and the kernel's
ephemeral ports, which start at 32768. A lock file in the temporary folder reserves the block until this process ends,
so that two test suites on one machine choose different ports.
"""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from filelock import FileLock, Timeout

from keel.deploy.authority import Authority
from keel.deploy.credentials import make_node_key
from keel.deploy.proxy import proxy_values, write_proxy
from keel.runs.folder import RunFolder

PATIENCE_SECONDS = 600
FIRST_PORT, PORTS_PER_BLOCK, BLOCKS = 21000, 10, 1000
HEARTBEAT_SECONDS = 10
"""Flower's minimum; its default is 30 s."""
OFFLINE_SECONDS = 2 * HEARTBEAT_SECONDS + 2
"""Time after which the SuperLink reports a killed node as unavailable and accepts it again, with a margin."""
NGINX = shutil.which("nginx", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"]))
KEEL = f'''#!{sys.executable}
"""keel with shorter intervals of SuperNodes. Without these patches the tests pass too, but they take longer."""

import sys
import time
from types import SimpleNamespace

from flwr.supernode import start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient

from keel.cli import main

# In the core state, and at the server, the interval is the time that an app has to start before it is started again.
if sys.argv[1:3] == ["deploy", "node"]:
    flower = [name for name in sys.modules if name.startswith("flwr.") and "corestate" not in name]
    for module in map(sys.modules.get, flower):
        for constant, seconds in ("HEARTBEAT_DEFAULT_INTERVAL", {HEARTBEAT_SECONDS}), ("MAX_RETRY_DELAY", 1):
            if constant in vars(module):
                setattr(module, constant, seconds)
    # What a node pushes is kept in a file, so that a test can send it again.
    push = FleetHttpClient.PushMessages

    def recorded(client, request):
        with open(f"pushed-{{request.node.node_id}}.bin", "ab") as file:
            file.write(len(request.SerializeToString()).to_bytes(4, "big") + request.SerializeToString())
        return push(client, request)

    FleetHttpClient.PushMessages = recorded
    # A node polls for messages every 3 s.
    start_client_internal.time = SimpleNamespace(**{{**vars(time), "sleep": lambda s: time.sleep(min(s, 0.3))}})
main()
'''
SUPEREXEC = f'''#!{sys.executable}
"""flower-superexec that forks client apps from a process that has imported PyTorch, and reconnects sooner.

Without these patches the tests pass too, but they take longer. A client app is still a process per message, and a
descendant of its node.
"""

import multiprocessing
import subprocess
import sys
from types import SimpleNamespace

from flwr.supercore.cli import flower_superexec
from flwr.supercore.retry import http_retry
from flwr.supercore.superexec.executor import subprocess_executor

CONTEXT = multiprocessing.get_context("forkserver")


def run_client_app(arguments):
    from flwr.supernode.cli import flwr_clientapp

    sys.argv = arguments
    flwr_clientapp()


def start(arguments, **options):
    if arguments[0] != "flwr-clientapp":
        return subprocess.Popen(arguments, **options)
    return CONTEXT.Process(target=run_client_app, args=(arguments,), daemon=True).start()


if __name__ == "__main__":
    CONTEXT.set_forkserver_preload(["flwr.supernode.cli", "keel.deploy.site"])
    http_retry.MAX_RETRY_DELAY = 1
    subprocess_executor.subprocess = SimpleNamespace(**{{**vars(subprocess), "Popen": start}})
    flower_superexec()
'''


class Federation:
    """The processes of one federation, and the files in its folder."""

    def __init__(self, folder: Path, sites: int):
        self.folder, self.runs = folder, folder / "runs"
        self.lock, ports = reserve_ports()
        self.port, self.proxy_port, self.free_ports, self.node_ports = (
            ports[0],
            ports[1],
            ports[2:-sites],
            ports[-sites:],
        )
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.last_run = ""
        self.nodes: dict[int, int] = {}
        """The IDs of the registered nodes by site."""
        scripts = folder / "bin"
        scripts.mkdir()
        for name, script in {"keel": KEEL, "flower-superexec": SUPEREXEC}.items():
            (scripts / name).write_text(script)
            (scripts / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(scripts), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "FLWR_HOME": str(folder / ".flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "PORT": str(self.port),
            "RETRY_SECONDS": "3",
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
        authority = self.folder / "certificates" / "ca.crt"
        self.wait_until(lambda: _answers(self.port, authority), "the server answers")

    def start_proxy(self) -> None:
        listen, superlink = f"127.0.0.1:{self.proxy_port}", f"127.0.0.1:{self.port}"
        write_proxy(self.folder, proxy_values(listen, superlink))
        self.start("proxy", "./start_proxy.sh")
        self.wait_until(lambda: _accepts_connections(self.proxy_port), "the proxy accepts connections")

    def add_site(self, site: int) -> None:
        """Make a site's keys, register its node and sign its certificate."""
        public = make_node_key(self.folder / "keys" / f"site-{site}")
        registered = self.flwr("supernode", "register", str(public), "federation", "--format", "json")
        self.nodes[site] = int(json.loads(registered)["node-id"])
        Authority.load(self.folder / "certificates").certify_site(site, public.with_suffix(".csr"))

    def start_node(self, site: int, settings: str = "") -> None:
        self.environment["NODE_PORT"] = str(self.node_ports[site])
        node_config = f'device="cpu" {settings}'.strip()
        port = self.proxy_port if "proxy" in self.processes else self.port
        self.start(f"site-{site}", "./start_site.sh", str(site), f"127.0.0.1:{port}", node_config)

    def stop_node(self, site: int) -> None:
        """Stop a node as an administrator does, with SIGTERM."""
        process = self.processes.pop(f"site-{site}")
        process.terminate()
        process.wait(PATIENCE_SECONDS)

    def kill(self, name: str) -> None:
        """Kill a process and its descendants with SIGKILL."""
        process = self.processes.pop(name)
        _kill_with_descendants(process.pid)
        process.wait()

    def flwr(self, *words: str) -> str:
        done = subprocess.run(
            ["flwr", *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, *options: str) -> None:
        answer = json.loads(self.flwr("run", ".", "federation", "--format", "json", *options))
        assert answer["success"], answer
        self.last_run = str(answer["run-id"])

    def records(self, name: str) -> list[dict[str, Any]]:
        return RunFolder(self.runs / name).records() if (self.runs / name / "metrics.jsonl").exists() else []

    def ended(self, name: str) -> bool:
        return (self.runs / name / "model.safetensors").exists()

    def hold(self, site: int, round: int) -> Path:
        """Let the app of a site wait in a round while the returned file exists: see `federated_app.py`."""
        file = self.folder / f"hold-{site}-{round}"
        file.touch()
        return file

    def trains_in(self, site: int, round: int) -> bool:
        """Return whether a site has received a message of that round, according to its SuperNode's log."""
        return f", ROUND {round}]" in self.log(f"site-{site}")

    def wait_until(self, condition: Callable[[], bool], what: str, *, during_run: bool = False) -> None:
        """Wait until the condition is true. Fail after PATIENCE_SECONDS, or when the Flower run ends before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            run_ended = during_run and self._run_ended()
            if (run_ended and not condition()) or time.monotonic() > deadline:
                run_log = self.run_log() if self.last_run else ""
                reason = "the run ended before" if run_ended else f"not within {PATIENCE_SECONDS} s"
                pytest.fail(f"{reason}: {what}\n{self.logs()}\nthe run:\n{run_log}")
            time.sleep(0.05)

    def _run_ended(self) -> bool:
        finished = re.compile(rf"Finished task \d+ of run {self.last_run}\b")
        return bool(self.last_run and finished.search(self.log("server")))

    def run_log(self) -> str:
        """Return the log of the server app in the last Flower run."""
        return self.flwr("log", self.last_run, "federation", "--show")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()[-4000:]}" for file in self.folder.glob("*.log"))

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        self.lock.release()


def reserve_ports() -> tuple[FileLock, list[int]]:
    """Reserve a block of free ports until the lock is released or this process ends."""
    for block in range(BLOCKS):
        first = FIRST_PORT + block * PORTS_PER_BLOCK
        lock = FileLock(Path(gettempdir()) / f"keel-test-ports-{first}.lock")
        try:
            lock.acquire(timeout=0)
        except (Timeout, PermissionError):  # another suite's, or another user's
            continue
        ports = list(range(first, first + PORTS_PER_BLOCK))
        if all(map(_is_free, ports)):
            return lock, ports
        lock.release()
    raise RuntimeError(f"no {PORTS_PER_BLOCK} free ports from {FIRST_PORT} on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(port: int, authority: Path) -> bool:
    """Return whether a TLS server answers: the port of Flower's server accepts connections before that."""
    context = ssl.create_default_context(cafile=authority)
    try:
        connection = socket.create_connection(("127.0.0.1", port), 2)
        with connection, context.wrap_socket(connection, server_hostname="127.0.0.1"):
            return True
    except OSError:
        return False


def _accepts_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _kill_with_descendants(process: int) -> None:
    """Kill a process, the processes that it started, and so on: Flower puts them in several process groups."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    descendants, generation = [process], [process]
    while generation:
        generation = [child for pid in generation for child in children.get(pid, [])]
        descendants += generation
    for pid in descendants:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended meanwhile
            continue
    while any(map(_runs, descendants)):  # until then a killed server still accepts connections
        time.sleep(0.02)


def _runs(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")
