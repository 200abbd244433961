"""A Ray on this machine that the cases of a process share, because starting one takes seconds."""

from functools import cache

from keel.engines.ray_cluster import LOCAL, Cluster
from keel.errors import KeelError

CORES = 2
STARTS = 5
"""How often Ray is started, at most, on a machine that is too busy: Ray itself gives up after 30 s."""


@cache
def shared_ray() -> Cluster:
    """Connect this process to a Ray that ends with it. Runs with the engine `ray` use the connection."""
    for _ in range(STARTS - 1):
        try:
            return _started()
        except KeelError:
            continue
    return _started()


def _started() -> Cluster:
    cluster = Cluster(LOCAL, cores=CORES)
    cluster.slots()  # connects
    return cluster
