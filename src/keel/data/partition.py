"""Ways to deal examples out to clients. Each uses an example at most once and is a pure function of its stream."""

from math import isfinite

import numpy as np

from keel.data.federated import Partition
from keel.errors import KeelError


def deal(
    labels: np.ndarray,
    stream: np.random.Generator,
    *,
    keys: np.ndarray | None = None,
    clients: int | None = None,
    alpha: float | None = None,
) -> Partition:
    """A client for each value of `keys`, or `clients` of them: by Dirichlet label mixes, or IID where alpha is None."""
    if keys is not None:
        if keys.shape != labels.shape:
            raise KeelError(f"data.keys: {len(keys)} keys for {len(labels)} inputs; accepted: one for each input")
        partition = by_key(keys)
        if clients not in (None, partition.clients):
            raise KeelError(f"data.clients: {clients}, but there are {partition.clients} keys; leave it out")
        return partition
    if not isinstance(clients, int) or clients < 1:
        raise KeelError(f"data.clients: {clients!r}; accepted: a whole number from 1, or keys that tell who holds what")
    if alpha is not None and not (isfinite(alpha) and alpha >= 0):
        raise KeelError(f"data.alpha: {alpha!r}; accepted: 0 (one class per client) or above")
    return iid(len(labels), clients, stream) if alpha is None else dirichlet(labels, clients, alpha, stream)


def iid(examples: int, clients: int, stream: np.random.Generator) -> Partition:
    """Shuffled and cut into equal parts; the remainder of the division is left out."""
    size = _size(examples, clients)
    order = stream.permutation(examples)[: size * clients]
    return Partition(order, np.arange(clients + 1) * size)


def dirichlet(labels: np.ndarray, clients: int, alpha: float, stream: np.random.Generator) -> Partition:
    """Each client draws a class mix q ~ Dir(alpha p) and then its examples by it, without replacement.

    p is the mix of the whole set and all clients hold equally many (Hsu et al., 2020). A class that has run out is
    left out of the mixes of the clients still to come. alpha = 0 is the limit: one class per client.
    """
    size = _size(len(labels), clients)
    if alpha == 0:
        return one_class(labels, clients, stream)
    pools = [stream.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    left = np.array([len(pool) for pool in pools])
    prior = left / left.sum()
    parts = []
    for mix in stream.dirichlet(alpha * prior, size=clients):
        taken = np.zeros_like(left)
        while (missing := size - taken.sum()) > 0:
            open_mix = np.where(left > taken, mix, 0.0)
            if open_mix.sum() == 0:  # every class of this client's mix has run out
                open_mix = left - taken
            draw = stream.multinomial(missing, open_mix / open_mix.sum())
            taken += np.minimum(draw, left - taken)
        parts.append(np.concatenate([pool[n - k : n] for pool, n, k in zip(pools, left, taken, strict=True)]))
        left = left - taken
    return Partition.of(parts)


def one_class(labels: np.ndarray, clients: int, stream: np.random.Generator) -> Partition:
    """Each client holds examples of one class, all equally many; classes get clients by their share of the set."""
    names, counts = np.unique(labels, return_counts=True)
    if clients < len(names):
        raise KeelError(
            f"data.clients: {clients} clients of one class each cannot cover {len(names)} classes; "
            f"accepted: at least {len(names)} with data.alpha = 0"
        )
    holders = np.ones(len(names), dtype=np.int64)
    for _ in range(clients - len(names)):  # next to the class whose clients would hold most
        holders[np.argmax(counts / holders)] += 1
    size = int((counts // holders).min())
    if size == 0:
        raise KeelError(f"data.clients: {clients} clients of one class each are more than {len(labels)} examples allow")
    parts = []
    for name, count in zip(names, holders, strict=True):
        pool = stream.permutation(np.flatnonzero(labels == name))
        parts += np.split(pool[: size * count], count)
    return Partition.of([parts[i] for i in stream.permutation(clients)])


def by_key(keys: np.ndarray) -> Partition:
    """One client for each value of a natural key (a writer, a user, a hospital), in the order of the values."""
    _, client = np.unique(keys, return_inverse=True)
    order = np.argsort(client, kind="stable")
    return Partition(order, np.concatenate([[0], np.cumsum(np.bincount(client))]))


def _size(examples: int, clients: int) -> int:
    if clients > examples:
        raise KeelError(f"data.clients: {clients} clients for {examples} training examples; accepted: 1 to {examples}")
    return examples // clients
