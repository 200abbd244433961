"""Client statistics: the number of examples and the label distribution of each client, and their heterogeneity."""

from typing import Any

import numpy as np

from keel.core.examples import FederatedData

MEASURED_CLIENTS = 1000
"""If there are more clients, the labels of this many are counted, evenly spaced."""
PICTURE_CLIENTS, PICTURE_CLASSES = 50, 100
"""The largest number of rows and columns of the picture."""


def client_statistics(data: FederatedData) -> dict[str, Any]:
    """Return the sizes, the label heterogeneity and a picture (clients by classes) of federated data, for JSON."""
    sizes = data.partition.sizes
    statistics: dict[str, Any] = {
        "name": data.name,
        "clients": data.partition.clients,
        "train_examples": int(sizes.sum()),
        "test_examples": len(data.test),
        "classes": data.classes,
        **({} if data.classes else {"outputs": data.outputs}),
        "input_shape": list(data.input_shape),
        "client_examples": {
            "least": int(sizes.min()),
            "median": float(np.median(sizes)),
            "mean": round(float(sizes.mean()), 1),
            "most": int(sizes.max()),
        },
    }
    if data.classes and data.is_local and data.train.targets.numel():
        clients = _spaced(data.partition.clients, MEASURED_CLIENTS)
        counts = label_counts(data, clients)
        picture = _picture(clients, counts)
        statistics |= {"measured_clients": len(clients), **heterogeneity(counts), "picture": picture}
        if data.class_names:
            picture["class_names"] = [data.class_names[label] for label in picture["classes"]]
        if data.client_names is not None:
            picture["client_names"] = [str(data.client_names[client]) for client in picture["clients"]]
    return statistics


def label_counts(data: FederatedData, clients: np.ndarray) -> np.ndarray:
    """Count the labels of some clients: one row per client, one column per class.

    The targets of a sequence are counted position by position, without the special tokens.
    """
    counts = np.zeros((len(clients), data.classes), dtype=np.int64)
    for row, client in enumerate(clients.tolist()):
        labels = data.train.targets[data.partition[client]].numpy().reshape(-1)
        counts[row] = np.bincount(labels[labels >= 0], minlength=data.classes)
    counts[:, list(data.specials)] = 0
    return counts


def heterogeneity(counts: np.ndarray) -> dict[str, float]:
    """Measure how much the label distributions of the clients differ.

    Returns:
        label_entropy: The mean entropy of a client's label distribution, in bits: 0 if each client has one class.
        label_entropy_whole: The entropy of the label distribution of all clients together: the value of
            `label_entropy` if all clients had the same distribution.
        label_distance: The mean total variation distance between a client's label distribution and that of all clients
            together: 0 if they are equal, near 1 if they have nothing in common.
    """
    overall = counts.sum(0) / counts.sum()
    distributions = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return {
        "label_entropy": round(float(_entropy(distributions).mean()), 3),
        "label_entropy_whole": round(float(_entropy(overall[None])[0]), 3),
        "label_distance": round(float(np.abs(distributions - overall).sum(1).mean() / 2), 3),
    }


def _entropy(distributions: np.ndarray) -> np.ndarray:
    return -(distributions * np.log2(np.where(distributions > 0, distributions, 1))).sum(1)


def _picture(clients: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Select clients and the most frequent classes to draw; clients are sorted by their most frequent class."""
    rows = _spaced(len(clients), PICTURE_CLIENTS)
    columns = np.sort(np.argsort(-counts.sum(0), kind="stable")[:PICTURE_CLASSES])
    shown = counts[np.ix_(rows, columns)]
    order = np.argsort(shown.argmax(1), kind="stable")
    return {
        "clients": clients[rows][order].tolist(),
        "classes": columns.tolist(),
        "counts": shown[order].tolist(),
        "examples": counts[rows].sum(1)[order].tolist(),
    }


def _spaced(count: int, most: int) -> np.ndarray:
    """Return 0 to count - 1, or `most` of these numbers, evenly spaced."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)
