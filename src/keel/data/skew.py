"""Partitioning schemes with label or quantity skew: per-class Dirichlet, k classes, shards, Dirichlet client sizes.

Every scheme assigns every example to one client and is a pure function of its random generator.
"""

from collections.abc import Callable
from math import gcd

import numpy as np

from keel.core.examples import Partition
from keel.errors import KeelError

MIN_EXAMPLES = 10
"""The default minimum number of examples per client of the schemes that are drawn again, that of NIID-Bench."""
DRAWS = 500
"""The number of draws after which a partition with enough examples for every client is given up."""


def dirichlet_per_class(
    labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator, min_examples: int = MIN_EXAMPLES
) -> Partition:
    """For each class, draw the proportions of its examples that the clients get from Dir(alpha 1_N).

    This is the convention of Yurochkin et al. (2019) and of NIID-Bench (Li et al., 2022). As in their code, a client
    that has 1/N of all examples gets none of the following classes, and all proportions are drawn again until every
    client has `min_examples` examples. Client sizes are unequal. `partition.dirichlet` draws a label distribution per
    client instead, from Dir(alpha p): with K balanced classes, its alpha is about K times the alpha of this scheme.
    """
    counts = np.unique(labels, return_counts=True)[1]

    def draw() -> np.ndarray:
        parts = np.empty((len(counts), clients), dtype=np.int64)
        sizes = np.zeros(clients, dtype=np.int64)
        for part, proportions, count in zip(parts, _proportions(len(counts), clients, alpha, rng), counts, strict=True):
            below = sizes < len(labels) / clients
            proportions = np.where(below, proportions, 0.0)
            if proportions.sum() == 0:  # the clients that this class was drawn for have enough examples
                proportions = below.astype(float)
            part[:] = _cut(proportions / proportions.sum(), count)
            sizes += part
        return parts

    parts = _draw_until(draw, len(labels), clients, alpha, min_examples)
    owners = np.repeat(np.tile(np.arange(clients), len(counts)), parts.reshape(-1))
    return _assigned(_shuffled_by_class(labels, rng), owners, clients)


def quantity(
    examples: int, clients: int, alpha: float, rng: np.random.Generator, min_examples: int = MIN_EXAMPLES
) -> Partition:
    """Draw the clients' shares of the examples from Dir(alpha 1_N), then the examples uniformly (Li et al., 2022).

    The shares are drawn again until every client has `min_examples` examples.
    """

    def draw() -> np.ndarray:
        return _cut(_proportions(1, clients, alpha, rng)[0], examples)[None]

    (sizes,) = _draw_until(draw, examples, clients, alpha, min_examples)
    return Partition(rng.permutation(examples), np.concatenate([[0], np.cumsum(sizes)]))


def k_classes(labels: np.ndarray, clients: int, k: int, rng: np.random.Generator) -> Partition:
    """Give each client examples of exactly k classes.

    The classes are shuffled and assigned to clients k at a time, from the first again after the last, and shuffled
    anew as soon as all have been assigned equally often. So the numbers of clients of two classes differ by at most
    one. The examples of a class are divided equally among its clients.
    """
    classes, counts = np.unique(labels, return_counts=True)
    if not 1 <= k <= len(classes):
        raise KeelError(f"data.classes_per_client must be from 1 to {len(classes)}, the number of classes (got {k})")
    if clients * k < len(classes):
        raise KeelError(
            f"data.clients must be at least {-(-len(classes) // k)} with data.classes_per_client = {k}, "
            f"so that each of {len(classes)} classes has a client (got {clients})"
        )
    label, holder = _assign_classes(len(classes), clients, k, rng)
    holders = np.bincount(label)
    if (scarce := np.flatnonzero(counts < holders)).size:
        raise KeelError(
            f"data.clients = {clients} is too many for data.classes_per_client = {k}: class {classes[scarce[0]]} has "
            f"{counts[scarce[0]]} examples for {holders[scarce[0]]} clients; use fewer clients"
        )
    rank = np.arange(len(label)) - np.repeat(np.cumsum(holders) - holders, holders)
    lengths = (counts // holders)[label] + (rank < (counts % holders)[label])
    return _assigned(_shuffled_by_class(labels, rng), np.repeat(holder, lengths), clients)


def _assign_classes(classes: int, clients: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of a class and a client that holds it, sorted by class and then by client."""
    period = classes * k // gcd(classes, k)  # assignments after which all classes have been assigned equally often
    order = rng.permuted(np.tile(np.arange(classes), (-(-clients * k // period), 1)), axis=1)
    assignment = np.arange(clients * k)
    label = order[assignment // period, assignment % classes]  # a period is a multiple of the number of classes
    by_class = np.argsort(label, kind="stable")
    return label[by_class], assignment[by_class] // k


def shards(labels: np.ndarray, clients: int, shards_per_client: int, rng: np.random.Generator) -> Partition:
    """Sort the examples by label, cut them into shards and give each client some, drawn at random.

    This is the pathological partition of McMahan et al. (2017), who use two shards per client. The sizes of two shards
    differ by at most one.
    """
    count, examples = clients * shards_per_client, len(labels)
    if not 1 <= shards_per_client <= examples // clients:
        raise KeelError(
            f"data.shards_per_client must be from 1 to {examples // clients}, so that each shard has an example "
            f"({examples} examples, {clients} clients) (got {shards_per_client})"
        )
    owner = np.empty(count, dtype=np.int64)
    owner[rng.permutation(count)] = np.arange(count) // shards_per_client
    sizes = np.diff(np.arange(count + 1) * examples // count)
    return _assigned(np.argsort(labels, kind="stable"), np.repeat(owner, sizes), clients)


def _proportions(rows: int, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    return rng.dirichlet(np.full(clients, alpha), size=rows)


def _cut(proportions: np.ndarray, examples: int) -> np.ndarray:
    """Divide a number of examples by proportions, rounding the positions of the cuts down."""
    cuts = (np.cumsum(proportions) * examples + 1e-9).astype(np.int64)  # a sum just below a whole number is that number
    cuts[-1] = examples
    return np.diff(cuts, prepend=0)


def _draw_until(
    draw: Callable[[], np.ndarray], examples: int, clients: int, alpha: float, min_examples: int
) -> np.ndarray:
    """Draw the numbers of examples (classes, clients) until every client has `min_examples`."""
    if clients * min_examples > examples:
        raise KeelError(
            f"data.min_examples must be at most {examples // clients} for {clients} clients and {examples} examples "
            f"(got {min_examples})"
        )
    for _ in range(DRAWS):
        counts = draw()
        if counts.sum(0).min() >= min_examples:
            return counts
    smaller = ", or a smaller data.min_examples" if min_examples > 1 else ""
    raise KeelError(
        f"data.alpha = {alpha} is too small for data.clients = {clients}: a client had fewer than {min_examples} of "
        f"{examples} examples in each of {DRAWS} draws; use a larger alpha or fewer clients{smaller}"
    )


def _shuffled_by_class(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the examples sorted by class, in random order within a class."""
    order = rng.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]


def _assigned(rows: np.ndarray, owners: np.ndarray, clients: int) -> Partition:
    """Return the partition in which rows[i] belongs to the client owners[i]."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=clients))])
    return Partition(rows[np.argsort(owners, kind="stable")], offsets)
