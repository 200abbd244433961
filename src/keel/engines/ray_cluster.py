"""A connection to a Ray cluster, or to a Ray that is started on this machine.

Ray is imported only when it is needed, and its less stable interfaces are used in this module alone. Ray's log messages
stay in its files; its errors become one line.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

from keel.engines.ray_watch import RayWatch
from keel.errors import KeelError, printable

LOCAL = "local"
SILENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns at every start that a default will change
}
SCHEDULE_TIMEOUT, POLL = 600.0, 1.0
"""Seconds until a node must have room for an actor or a run, and between two polls, after which signals are handled.

A node that is busy, or that has to be started first, takes minutes.
"""
CONNECT_TIMEOUT = 10.0
"""Seconds until a cluster must accept a connection. Ray itself would try for minutes."""
_connected: "WeakSet[Cluster]" = WeakSet()
"""The clusters that use a connection made here. The last one to leave closes it."""
_watches: list[RayWatch] = []
"""The watch over a connection made here."""


def load_ray() -> ModuleType:
    """Import Ray."""
    try:
        import ray
    except ImportError:
        raise KeelError("engine.name = 'ray' requires Ray; run: pip install 'keel-fl[ray]'") from None
    return ray


def is_connected() -> bool:
    """Return whether this process has a connection to Ray. Ray is not imported for it."""
    return "ray" in sys.modules and load_ray().is_initialized()


def in_ray_worker() -> bool:
    """Return whether this process is a Ray worker. A run in a worker computes in its process."""
    return is_connected() and load_ray().get_runtime_context().get_task_id() is not None


def node_address() -> str:
    """Return the IP address of the node that this process runs on."""
    return str(load_ray().util.get_node_ip_address())


def this_node() -> Any:
    """Return the scheduling strategy by which Ray starts an actor on the node that this process runs on."""
    ray = load_ray()
    node = ray.get_runtime_context().get_node_id()
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


class Cluster:
    """A Ray cluster, for actors or runs that take one core and `gpus` GPUs each.

    If the program has connected to Ray before, that connection is used and left open.

    Args:
        address: The cluster's address; "local" starts Ray on this machine. Default: RAY_ADDRESS, or "local".
        cores: The cores of a Ray that is started here.
    """

    def __init__(self, address: str | None = None, gpus: float | None = None, cores: int | None = None):
        self.address = address or os.environ.get("RAY_ADDRESS") or LOCAL
        self.gpus, self.cores = gpus or 0.0, cores

    @property
    def is_local(self) -> bool:
        """Whether all actors run on this machine."""
        return self.address == LOCAL

    @property
    def ray(self) -> ModuleType:
        """Ray, with a connection, which is made if there is none."""
        ray = load_ray()
        if not ray.is_initialized():
            self._connect(ray)
            _connected.add(self)
        elif _connected:
            _connected.add(self)
        return ray

    def slots(self) -> int:
        """Return how many actors or runs fit on the cluster."""
        count = self.slots_now()
        if count == 0:
            gpus = sum(node.get("GPU", 0.0) for node in self._nodes())
            self.leave()
            if self.gpus:
                raise KeelError(
                    f"engine.gpus must not exceed the GPUs of a node (got {self.gpus:g}, the cluster has {gpus:g})"
                )
            raise KeelError(f"engine.address: the cluster at {self.address!r} has no free core; use another cluster")
        return count

    def slots_now(self) -> int:
        """Return how many actors or runs the nodes that are alive have room for; 0 if every node is lost."""
        return sum(map(self._slots_of, self._nodes()))

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Turn an error of Ray itself into an OSError of one line."""
        try:
            yield
        except load_ray().exceptions.RayError as error:  # not self.ray, which would connect again
            raise OSError(f"Ray: {one_line(error)}") from error

    def leave(self) -> None:
        """Close the connection if it was made here and no other Cluster uses it. May be called repeatedly."""
        if self in _connected:
            _connected.remove(self)
            if not _connected:
                while _watches:
                    _watches.pop().stop()
                load_ray().shutdown()

    def _nodes(self) -> list[dict[str, float]]:
        """Return the resources of each node that is alive."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _slots_of(self, node: dict[str, float]) -> int:
        cores = int(node.get("CPU", 0))
        return min(cores, int(node.get("GPU", 0) / self.gpus + 1e-9)) if self.gpus else cores

    def _connect(self, ray: ModuleType) -> None:
        os.environ.update({name: value for name, value in SILENT.items() if name not in os.environ})
        options = {"num_cpus": self.cores, "include_dashboard": False} if self.is_local else {}
        self._check_port()
        try:
            with _signal_handlers_kept(), _on_loopback() if self.is_local else nullcontext():
                ray.init(self.address, log_to_driver=False, logging_level="critical", namespace="keel", **options)
        except Exception as error:  # Ray raises plain ones, as when it starts too slowly on a busy machine
            raise self._unreachable(one_line(error)) from error
        _watches.extend(RayWatch(raylet, ray.get_runtime_context().gcs_address) for raylet in _raylets_here(ray))

    def _check_port(self) -> None:
        """Raise a KeelError if nothing listens on the port of the address, if it has one."""
        host, _, port = self.address.rpartition("://")[2].rpartition(":")
        if port.isdigit():
            try:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
            except OSError as error:
                raise self._unreachable(error.strerror or str(error)) from error

    def _unreachable(self, reason: str) -> KeelError:
        return KeelError(
            f"engine.address: no Ray at {self.address!r} ({reason}); use 'local' (starts one), 'auto' (the one that "
            "runs on this machine), HOST:PORT or ray://HOST:PORT"
        )


def one_line(error: BaseException) -> str:
    """Return the last line of an error of Ray's; the lines before it are process ids and addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[-1]) if lines else type(error).__name__


def _raylets_here(ray: ModuleType) -> list[str]:
    """Return the Unix socket of the raylet that this process depends on; none if Ray has no such sockets here."""
    here = ray.get_runtime_context().get_node_id()
    sockets = [node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == here]
    return [path for path in sockets if Path(path).is_socket()]


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a Ray that is started here listen on the loopback interface only: whoever reaches it can run code.

    Ray replaces the address 127.0.0.1 by that of the network, except where it does not support clusters (macOS).
    """
    constants = import_module("ray._private.ray_constants")
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before  # type: ignore[attr-defined]


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the SIGTERM handler that ray.init replaces: the run decides how it is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
