"""Partition a data set over clients; the schemes IID, Dirichlet label distributions, and natural keys.

Every scheme assigns an example to at most one client and is a pure function of its random generator.
"""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import numpy as np

from keel.core.examples import Examples, FederatedData, Partition, fingerprint
from keel.core.randomness import keyed_rng
from keel.data.dataset import Dataset
from keel.data.feature_shift import with_noise
from keel.data.schemes import SHARDS_PER_CLIENT, PartitionScheme, check_fields
from keel.data.skew import MIN_EXAMPLES, dirichlet_per_class, k_classes, quantity, shards
from keel.errors import KeelError, shown

CLIENTS_PER_DRAW = 1 << 14
"""The largest number of clients whose class counts are drawn in one call."""


def partition_dataset(
    name: str,
    dataset: Dataset,
    seed: int,
    scheme: PartitionScheme,
    *,
    clients: int | None = None,
    alpha: float | None = None,
    classes_per_client: int | None = None,
    shards_per_client: int | None = None,
    noise: float | None = None,
    min_examples: int | None = None,
    max_examples: int | None = None,
    test_examples: int | None = None,
) -> FederatedData:
    """Assign the examples of a data set to clients.

    Args:
        name: The name of the data set, for reports and errors.
        dataset: The examples.
        seed: The seed of the run. The partition is a function of it.
        scheme: "key" makes one client per natural key. The others make `clients` clients: "iid" and "dirichlet" (a
            label distribution per client) of equal size, "dirichlet_per_class" by a distribution over the clients per
            class, "classes" with `classes_per_client` classes each, "shards" with shards of the sorted examples,
            "quantity" of unequal size, "feature" of equal size with noise on their inputs.
        clients: The number of clients. With "key", that many of the natural clients are drawn (default: all).
        alpha: The concentration of the Dirichlet distributions. Of "dirichlet", the total concentration of a client's
            label distribution; 0, the default, is one class per client. Of "dirichlet_per_class" and "quantity", the
            concentration per client.
        classes_per_client: The number of classes of each client of "classes".
        shards_per_client: The number of shards of each client of "shards" (default: 2).
        noise: The variance of the noise on the inputs of the last client of "feature"; that of client i of N is i/N
            of it.
        min_examples: With "key", clients with fewer examples are left out. With "dirichlet_per_class" and "quantity",
            the partition is drawn again until every client has as many (default: 10).
        max_examples: A client keeps at most this many of its examples, drawn at random.
        test_examples: At most this many test examples, drawn at random, the same for every seed.
    """
    rng = keyed_rng(seed, "partition")
    fields = {
        "alpha": alpha,
        "classes_per_client": classes_per_client,
        "shards_per_client": shards_per_client,
        "noise": noise,
        "min_examples": min_examples,
    }
    check_fields(scheme, fields)
    client_names = test_clients = None
    if scheme == "key":
        partition, client_names, test, test_clients = _natural_clients(name, dataset, clients, min_examples or 1, rng)
    else:
        partition, test = _assign(dataset, scheme, clients, fields, rng), dataset.test
    if max_examples is not None:
        partition = limit_examples(partition, max_examples, rng)
    if dataset.rows is not None:
        partition = Partition(dataset.rows[partition.indices], partition.offsets)
    if noise is not None:
        dataset = with_noise(dataset, partition, noise, keyed_rng(seed, "feature noise"))
        test = dataset.test
    if test_examples is not None and test_examples < len(test):
        rows = np.sort(keyed_rng(0, "test examples").permutation(len(test))[:test_examples])
        test, test_clients = test.subset(rows), None if test_clients is None else test_clients[rows]
    return FederatedData(
        name,
        dataset.train,
        test,
        partition,
        dataset.classes,
        dataset.transform,
        dataset.specials,
        dataset.sha256 or fingerprint(dataset.train, dataset.test),
        task=dataset.task,
        test_clients=test_clients,
        class_names=dataset.class_names,
        client_names=client_names,
    )


def _natural_clients(
    name: str, dataset: Dataset, clients: int | None, min_examples: int, rng: np.random.Generator
) -> tuple[Partition, np.ndarray | None, Examples, np.ndarray | None]:
    """Partition by key.

    Returns:
        The partition, the names of the clients (None if they are their numbers), the clients' test examples, and the
        client of each of these (None if they belong to no client).
    """
    if dataset.keys is None:
        raise KeelError(f"data.partition = 'key' requires natural clients, which {name} does not have")
    partition, names = by_key(dataset.keys)
    chosen = _choose_clients(partition, clients, min_examples, rng)
    names, test, owners = names[chosen], dataset.test, None
    if dataset.test_keys is not None:
        rows = _test_rows_of(names, dataset.test_keys)
        test = test if len(rows) == len(test) else test.subset(rows)
        owners = np.searchsorted(names, dataset.test_keys[rows])  # by_key sorts the names
    numbered = np.array_equal(names, np.arange(len(names)))
    return select_clients(partition, chosen), None if numbered else names, test, owners


def _assign(
    dataset: Dataset,
    scheme: PartitionScheme,
    clients: int | None,
    fields: Mapping[str, Any],
    rng: np.random.Generator,
) -> Partition:
    """Partition by a scheme that does not need natural clients."""
    examples = len(dataset.train if dataset.rows is None else dataset.rows)
    if not isinstance(clients, int):
        raise KeelError(f"data.clients must be a whole number from 1 for data without keys (got {shown(clients)})")
    if not 1 <= clients <= examples:
        raise KeelError(f"data.clients must be from 1 to {examples}, the number of training examples (got {clients})")
    min_examples = fields["min_examples"] or MIN_EXAMPLES
    match scheme:
        case "quantity":
            return quantity(examples, clients, fields["alpha"], rng, min_examples)
        case "dirichlet":
            return dirichlet(_labels(dataset, scheme), clients, fields["alpha"] or 0.0, rng)
        case "dirichlet_per_class":
            return dirichlet_per_class(_labels(dataset, scheme), clients, fields["alpha"], rng, min_examples)
        case "classes":
            return k_classes(_labels(dataset, scheme), clients, fields["classes_per_client"], rng)
        case "shards":
            return shards(_labels(dataset, scheme), clients, fields["shards_per_client"] or SHARDS_PER_CLIENT, rng)
        case _:  # "iid", and "feature", whose noise is added to IID clients
            return iid(examples, clients, rng)


def _labels(dataset: Dataset, scheme: PartitionScheme) -> np.ndarray:
    """Return the label of each example."""
    labels = dataset.train.targets.numpy()
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise KeelError(
            f"data.partition = {scheme!r} requires one label per example "
            f"(got {labels.dtype} targets of shape {labels.shape[1:]}); use 'iid', 'quantity', 'feature' or 'key'"
        )
    return labels if dataset.rows is None else labels[dataset.rows]


def iid(examples: int, clients: int, rng: np.random.Generator) -> Partition:
    """Shuffle the examples and split them into equal parts; the remainder of the division is left out."""
    size = examples // clients
    order = rng.permutation(examples)[: size * clients]
    return Partition(order, np.arange(clients + 1) * size)


def dirichlet(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> Partition:
    """Draw a label distribution q ~ Dir(alpha p) for each client, then its examples from q, without replacement.

    p is the label distribution of the whole data set, and all clients get the same number of examples (Hsu et al.,
    2019). A class without examples left is removed from the distributions of the remaining clients. alpha = 0 is the
    limit: one class per client. `skew.dirichlet_per_class` is the other convention.
    """
    if not (isfinite(alpha) and alpha >= 0):
        raise KeelError(f"data.alpha must be 0 (one class per client) or positive (got {alpha!r})")
    size = len(labels) // clients
    if alpha == 0:
        return one_class(labels, clients, rng)
    dtype = np.int32 if len(labels) < 2**31 else np.int64
    by_class = [rng.permutation(np.flatnonzero(labels == c).astype(dtype)) for c in np.unique(labels)]
    available = np.array([len(rows) for rows in by_class])
    distributions = rng.dirichlet(alpha * (available / available.sum()), size=clients)
    order, ends, parts = np.concatenate(by_class), np.cumsum(available), []
    del by_class  # one copy of a million clients' examples is enough
    for counts in _draw_class_counts(distributions, size, available, rng):
        starts = ends - np.cumsum(counts, axis=0)  # the examples of a class are used from the last to the first
        lengths, ends = counts.reshape(-1), starts[-1]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        parts.append(order[np.repeat(starts.reshape(-1), lengths) + within])
    return Partition(np.concatenate(parts), np.arange(clients + 1) * size)


def _draw_class_counts(
    distributions: np.ndarray, size: int, available: np.ndarray, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Draw how many examples of each class the clients get, in groups of clients: arrays (clients, classes).

    While no class runs out, clients are independent and a group is drawn in one call. If a class would run out, the
    generator is reset and half as many clients are tried; a single client gets what is available.
    """
    done, group = 0, CLIENTS_PER_DRAW
    while done < len(distributions):
        state = rng.bit_generator.state
        remaining = np.where(available > 0, distributions[done : done + group], 0.0)
        if (sums := remaining.sum(1, keepdims=True)).all():
            counts = rng.multinomial(size, remaining / sums)
            if np.all((counts.sum(0) < available) | (available == 0)):
                available = available - counts.sum(0)
                done += len(counts)
                group = min(2 * group, CLIENTS_PER_DRAW)
                yield counts
                continue
        rng.bit_generator.state = state
        group = max(1, min(group, len(distributions) - done) // 2)
        if group == 1:
            single = _draw_single_client(distributions[done], size, available, rng)
            available, done = available - single, done + 1
            yield single[None]


def _draw_single_client(
    distribution: np.ndarray, size: int, available: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draw the class counts of one client while classes run out."""
    counts = np.zeros_like(available)
    while (missing := size - counts.sum()) > 0:
        remaining = np.where(available > counts, distribution, 0.0)
        if remaining.sum() == 0:  # every class of this client's distribution has run out
            remaining = available - counts
        draw = rng.multinomial(missing, remaining / remaining.sum())
        counts += np.minimum(draw, available - counts)
    return counts


def one_class(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Partition:
    """Give each client examples of one class, all clients equally many; frequent classes get more clients."""
    classes, counts = np.unique(labels, return_counts=True)
    if clients < len(classes):
        raise KeelError(
            f"data.clients must be at least {len(classes)}, the number of classes, with data.alpha = 0 (got {clients})"
        )
    clients_per_class = _clients_per_class(counts, clients)
    size = int((counts // clients_per_class).min())
    if size == 0:
        raise KeelError(
            f"data.clients = {clients} is too many for data.alpha = 0: {len(labels)} examples do not give each client "
            "one of its class; use fewer clients"
        )
    by_class = [
        rng.permutation(np.flatnonzero(labels == c))[: size * n]
        for c, n in zip(classes, clients_per_class, strict=True)
    ]
    parts = np.concatenate(by_class).reshape(clients, size)[rng.permutation(clients)]
    return Partition(parts.reshape(-1), np.arange(clients + 1) * size)


def _clients_per_class(counts: np.ndarray, clients: int) -> np.ndarray:
    """Give each class one client, then each further client to the class with the most examples per client."""
    most = np.minimum(clients - len(counts), 1 + np.ceil(clients * counts / counts.sum()).astype(np.int64))
    label = np.repeat(np.arange(len(counts)), most)  # no class gets more than its `most` further clients
    further = np.arange(len(label)) - np.repeat(np.cumsum(most) - most, most)
    order = np.lexsort((label, -counts[label] / (1 + further)))[: clients - len(counts)]
    return 1 + np.bincount(label[order], minlength=len(counts))


def by_key(keys: np.ndarray) -> tuple[Partition, np.ndarray]:
    """Make one client per value of a natural key (a writer, a user, a hospital).

    Returns:
        The partition, and the values in the order of the clients: sorted.
    """
    try:
        names, client = np.unique(keys, return_inverse=True)
    except TypeError as error:
        raise KeelError(f"data.keys must be all numbers or all texts, so that they can be sorted ({error})") from error
    order = np.argsort(client, kind="stable")
    return Partition(order, np.concatenate([[0], np.cumsum(np.bincount(client))])), names


def select_clients(partition: Partition, chosen: np.ndarray) -> Partition:
    """Return the partition of the chosen clients, in the order of `chosen`."""
    if len(chosen) == partition.clients:
        return partition
    sizes = partition.sizes_of(chosen)
    ends = np.cumsum(sizes)
    positions = np.arange(ends[-1]) + np.repeat(partition.offsets[chosen] - (ends - sizes), sizes)
    return Partition(partition.indices[positions], np.concatenate([[0], ends]))


def limit_examples(partition: Partition, most: int, rng: np.random.Generator) -> Partition:
    """Keep at most `most` examples of each client, drawn at random."""
    client = np.repeat(np.arange(partition.clients), partition.sizes)
    shuffled = np.lexsort((rng.random(len(client)), client))  # shuffles within each client
    rank = np.arange(len(client)) - partition.offsets[client]
    kept = np.sort(shuffled[rank < most])
    return Partition(partition.indices[kept], np.concatenate([[0], np.cumsum(np.minimum(partition.sizes, most))]))


def _choose_clients(
    partition: Partition, clients: int | None, min_examples: int, rng: np.random.Generator
) -> np.ndarray:
    eligible = np.flatnonzero(partition.sizes >= min_examples)
    if len(eligible) == 0:
        raise KeelError(
            f"data.min_examples must be at most {partition.sizes.max()}, the size of the largest client "
            f"(got {min_examples})"
        )
    if clients is None or clients == len(eligible):
        return eligible
    if clients > len(eligible):
        condition = f" with {min_examples} examples or more" if min_examples > 1 else ""
        raise KeelError(
            f"data.clients must be at most {len(eligible)}, the number of natural clients{condition} (got {clients})"
        )
    return np.sort(rng.choice(eligible, clients, replace=False))


def _test_rows_of(names: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the test examples of the clients that train."""
    rows = np.flatnonzero(np.isin(keys, names))
    if len(rows) == 0:
        raise KeelError("data.clients: none of the drawn clients has test examples; use more clients")
    return rows
