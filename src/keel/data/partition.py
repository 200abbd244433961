"""Ways to deal examples out to clients. Each uses an example at most once and is a pure function of its stream."""

from collections.abc import Iterator
from math import isfinite
from typing import Literal

import numpy as np

from keel.data.federated import Examples, FederatedData, Partition, Pool, fingerprint
from keel.errors import KeelError
from keel.randomness import draws

Way = Literal["dirichlet", "iid", "key"]
AT_ONCE = 1 << 14
"""Clients whose classes are drawn together at the most."""


def deal_out(
    name: str,
    pool: Pool,
    seed: int,
    way: Way,
    *,
    clients: int | None = None,
    alpha: float = 0.0,
    min_examples: int | None = None,
    max_examples: int | None = None,
    test_examples: int | None = None,
) -> FederatedData:
    """A pool's examples with their clients: one for each key, or `clients` of any kind.

    By key, those with fewer than `min_examples` are left out and `clients` of the others are drawn. A client's
    examples beyond `max_examples` are left out, and so are test examples beyond `test_examples`, by a draw that is
    the same for every seed.
    """
    stream = draws(seed, "partition")
    labels = pool.train.targets.numpy()
    if pool.rows is not None:
        labels = labels[pool.rows]
    test = pool.test
    if way == "key":
        if pool.keys is None:
            raise KeelError(f"data.partition: 'key', but {name} has no keys that tell who holds what")
        partition, names = by_key(pool.keys)
        chosen = _choose(partition, clients, min_examples or 1, stream)
        partition = only(partition, chosen)
        if pool.test_keys is not None:
            test = _test_of(names[chosen], test, pool.test_keys)
    else:
        if not isinstance(clients, int):
            raise KeelError(
                f"data.clients: {clients!r}; accepted: a whole number from 1, or keys that tell who holds what"
            )
        if min_examples is not None:
            raise KeelError(f"data.min_examples: {min_examples} goes with data.partition = 'key'")
        partition = iid(len(labels), clients, stream) if way == "iid" else dirichlet(labels, clients, alpha, stream)
    if max_examples is not None:
        partition = capped(partition, max_examples, stream)
    if pool.rows is not None:
        partition = Partition(pool.rows[partition.indices], partition.offsets)
    if test_examples is not None and test_examples < len(test):
        test = test[np.sort(draws(0, "test examples").permutation(len(test))[:test_examples])]
    source = pool.sha256 or fingerprint(pool.train, pool.test)
    return FederatedData(name, pool.train, test, partition, pool.classes, pool.prepare, pool.specials, source)


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
    if not (isfinite(alpha) and alpha >= 0):
        raise KeelError(f"data.alpha: {alpha!r}; accepted: 0 (one class per client) or above")
    if labels.ndim != 1:
        raise KeelError("data.partition: 'dirichlet' needs one label per example; accepted: 'iid', 'key'")
    size = _size(len(labels), clients)
    if alpha == 0:
        return one_class(labels, clients, stream)
    kind = np.int32 if len(labels) < 2**31 else np.int64
    pools = [stream.permutation(np.flatnonzero(labels == c).astype(kind)) for c in np.unique(labels)]
    left = np.array([len(pool) for pool in pools])
    mixes = stream.dirichlet(alpha * (left / left.sum()), size=clients)
    order, ends, dealt = np.concatenate(pools), np.cumsum(left), []
    del pools  # of a million clients' examples one copy is enough
    for taken in _takings(mixes, size, left, stream):
        firsts = ends - np.cumsum(taken, axis=0)  # each class is dealt out from its end
        counts, ends = taken.reshape(-1), firsts[-1]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        dealt.append(order[np.repeat(firsts.reshape(-1), counts) + within])
    return Partition(np.concatenate(dealt), np.arange(clients + 1) * size)


def _takings(mixes: np.ndarray, size: int, left: np.ndarray, stream: np.random.Generator) -> Iterator[np.ndarray]:
    """How many examples of each class each client takes, for some clients after the other.

    As long as no class runs out, clients do not depend on each other and are drawn together. Where one does, the
    draws are taken back, and half as many clients are tried; one alone takes what there is.
    """
    begun, some = 0, AT_ONCE
    while begun < len(mixes):
        before = stream.bit_generator.state
        mix = np.where(left > 0, mixes[begun : begun + some], 0.0)
        if (sums := mix.sum(1, keepdims=True)).all():
            taken = stream.multinomial(size, mix / sums)
            if np.all((taken.sum(0) < left) | (left == 0)):
                left = left - taken.sum(0)
                begun += len(taken)
                some = min(2 * some, AT_ONCE)
                yield taken
                continue
        stream.bit_generator.state = before
        some = max(1, min(some, len(mixes) - begun) // 2)
        if some == 1:
            alone = _alone(mixes[begun], size, left, stream)
            left, begun = left - alone, begun + 1
            yield alone[None]


def _alone(mix: np.ndarray, size: int, left: np.ndarray, stream: np.random.Generator) -> np.ndarray:
    """One client's takings where classes may run out meanwhile."""
    taken = np.zeros_like(left)
    while (missing := size - taken.sum()) > 0:
        open_mix = np.where(left > taken, mix, 0.0)
        if open_mix.sum() == 0:  # every class of this client's mix has run out
            open_mix = left - taken
        draw = stream.multinomial(missing, open_mix / open_mix.sum())
        taken += np.minimum(draw, left - taken)
    return taken


def one_class(labels: np.ndarray, clients: int, stream: np.random.Generator) -> Partition:
    """Each client holds examples of one class, all equally many; classes get clients by their share of the set."""
    names, counts = np.unique(labels, return_counts=True)
    if clients < len(names):
        raise KeelError(
            f"data.clients: {clients} clients of one class each cannot cover {len(names)} classes; "
            f"accepted: at least {len(names)} with data.alpha = 0"
        )
    holders = _holders(counts, clients)
    size = int((counts // holders).min())
    if size == 0:
        raise KeelError(f"data.clients: {clients} clients of one class each are more than {len(labels)} examples allow")
    pools = [
        stream.permutation(np.flatnonzero(labels == name))[: size * h] for name, h in zip(names, holders, strict=True)
    ]
    parts = np.concatenate(pools).reshape(clients, size)[stream.permutation(clients)]
    return Partition(parts.reshape(-1), np.arange(clients + 1) * size)


def _holders(counts: np.ndarray, clients: int) -> np.ndarray:
    """How many clients each class gets: one, and each further client goes to the class whose clients hold most."""
    most = np.minimum(clients - len(counts), 1 + np.ceil(clients * counts / counts.sum()).astype(np.int64))
    label = np.repeat(np.arange(len(counts)), most)  # a class's turns, of which the first `most` can come
    turn = np.arange(len(label)) - np.repeat(np.cumsum(most) - most, most)
    order = np.lexsort((label, -counts[label] / (1 + turn)))[: clients - len(counts)]
    return 1 + np.bincount(label[order], minlength=len(counts))


def by_key(keys: np.ndarray) -> tuple[Partition, np.ndarray]:
    """One client for each value of a natural key (a writer, a user, a hospital), in the order of the values."""
    try:
        names, client = np.unique(keys, return_inverse=True)
    except TypeError as error:
        raise KeelError(f"data.keys: cannot be put in order ({error}); accepted: numbers or texts alone") from error
    order = np.argsort(client, kind="stable")
    return Partition(order, np.concatenate([[0], np.cumsum(np.bincount(client))])), names


def only(partition: Partition, chosen: np.ndarray) -> Partition:
    """The chosen clients of a partition, in their order."""
    if len(chosen) == partition.clients:
        return partition
    sizes = partition.sizes_of(chosen)
    ends = np.cumsum(sizes)
    places = np.arange(ends[-1]) + np.repeat(partition.offsets[chosen] - (ends - sizes), sizes)
    return Partition(partition.indices[places], np.concatenate([[0], ends]))


def capped(partition: Partition, most: int, stream: np.random.Generator) -> Partition:
    """At most so many examples of each client, drawn from its own."""
    owner = np.repeat(np.arange(partition.clients), partition.sizes)
    shuffled = np.lexsort((stream.random(len(owner)), owner))  # each client's places in a new order
    rank = np.arange(len(owner)) - partition.offsets[owner]
    kept = np.sort(shuffled[rank < most])
    return Partition(partition.indices[kept], np.concatenate([[0], np.cumsum(np.minimum(partition.sizes, most))]))


def _choose(partition: Partition, clients: int | None, least: int, stream: np.random.Generator) -> np.ndarray:
    able = np.flatnonzero(partition.sizes >= least)
    if len(able) == 0:
        raise KeelError(f"data.min_examples: {least}; accepted: at most {partition.sizes.max()}, as many as one has")
    if clients is None or clients == len(able):
        return able
    if clients > len(able):
        with_enough = f" with {least} examples or more" if least > 1 else ""
        raise KeelError(f"data.clients: {clients}, but there are {len(able)}{with_enough}; accepted: 1 to {len(able)}")
    return np.sort(stream.choice(able, clients, replace=False))


def _test_of(names: np.ndarray, test: Examples, keys: np.ndarray) -> Examples:
    """The test examples of those who take part."""
    theirs = np.flatnonzero(np.isin(keys, names))
    if len(theirs) == 0:
        raise KeelError("data.clients: none of the clients has test examples; accepted: more clients")
    return test if len(theirs) == len(test) else test[theirs]


def _size(examples: int, clients: int) -> int:
    if clients < 1:
        raise KeelError(f"data.clients: {clients}; accepted: a whole number from 1")
    if clients > examples:
        raise KeelError(f"data.clients: {clients} clients for {examples} training examples; accepted: 1 to {examples}")
    return examples // clients
