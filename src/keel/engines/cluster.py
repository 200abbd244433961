"""A Ray cluster: joined, or started on this machine. Ray is imported here and nowhere else, when it is needed.

What Ray logs stays in its own files; what goes wrong is said in one line.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from weakref import WeakSet

from keel.errors import KeelError

LOCAL = "local"
SILENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or every start warns of a default that is to change
}
REACHED_WITHIN = 10.0
"""Seconds for the first answer of a cluster: Ray itself would try for minutes."""
_started: "WeakSet[Cluster]" = WeakSet()
"""Those who use a Ray that was begun here; the last one ends it."""


def load_ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise KeelError("engine.name: 'ray' needs Ray; accepted: pip install 'keel-fl[ray]'") from None
    return ray


def in_slot() -> bool:
    """Whether this process is one of a cluster's own, which computes where it is."""
    if "ray" not in sys.modules:
        return False
    ray = load_ray()
    return ray.is_initialized() and ray.get_runtime_context().get_task_id() is not None


class Cluster:
    """A cluster at an address ("local" starts one), for actors or runs that have a core each and so many GPUs.

    Where a program has connected to Ray already, that is what is used, and left as it is.
    """

    def __init__(self, address: str | None = None, gpus: float | None = None, cores: int | None = None):
        self.address = address or os.environ.get("RAY_ADDRESS") or LOCAL
        self.gpus, self.cores = gpus or 0.0, cores

    @property
    def ray(self) -> ModuleType:
        """Ray, connected."""
        ray = load_ray()
        if not ray.is_initialized():
            self._join(ray)
            _started.add(self)
        elif _started:
            _started.add(self)
        return ray

    def slots(self) -> int:
        """How many actors or runs there is room for at a time."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        found = sum(self._fit(node) for node in nodes)
        if found == 0:
            gpus = sum(node.get("GPU", 0.0) for node in nodes)
            self.leave()
            if self.gpus:
                raise KeelError(f"engine.gpus: {self.gpus:g}, but the cluster has {gpus:g}; accepted: what a node has")
            raise KeelError(f"engine.address: the cluster at {self.address!r} has no core to give; accepted: another")
        return found

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What goes wrong with Ray itself, in one line."""
        try:
            yield
        except load_ray().exceptions.RayError as error:  # whatever comes is looked at, and must not connect again
            raise OSError(f"Ray: {one_line(error)}") from error

    def leave(self) -> None:
        """Ends what was begun here, if nobody else uses it."""
        if self in _started:
            _started.remove(self)
            if not _started:
                load_ray().shutdown()

    def _fit(self, node: dict[str, float]) -> int:
        cores = int(node.get("CPU", 0))
        return min(cores, int(node.get("GPU", 0) / self.gpus + 1e-9)) if self.gpus else cores

    def _join(self, ray: ModuleType) -> None:
        os.environ.update({name: value for name, value in SILENT.items() if name not in os.environ})
        more = {"num_cpus": self.cores, "include_dashboard": False} if self.address == LOCAL else {}
        self._reach()
        try:
            with _own_signals():
                ray.init(self.address, log_to_driver=False, logging_level="critical", namespace="keel", **more)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise self._unreachable(one_line(error)) from error

    def _reach(self) -> None:
        """Asks whether anybody listens, where the address tells at which port."""
        host, _, port = self.address.rpartition("://")[2].rpartition(":")
        if port.isdigit():
            try:
                socket.create_connection((host.strip("[]"), int(port)), REACHED_WITHIN).close()
            except OSError as error:
                raise self._unreachable(error.strerror or str(error)) from error

    def _unreachable(self, reason: str) -> KeelError:
        return KeelError(
            f"engine.address: no Ray at {self.address!r} ({reason}); accepted: 'local' (starts one), 'auto' (the one "
            "that runs on this machine), HOST:PORT or ray://HOST:PORT"
        )


def one_line(error: BaseException) -> str:
    """What an error of Ray's says in the end: before it come processes and addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray answers a polite kill by itself once it runs; who stops a run, and how, is the run's to say."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
