"""Who holds what: how many examples of each class each client has, and how far the clients are from one another."""

from typing import Any

import numpy as np

from keel.data.federated import FederatedData

MEASURED = 1000
"""Clients that are looked at, evenly taken from all, where there are more."""
ROWS, COLUMNS = 50, 100
"""Clients and classes of the picture."""


def holdings(data: FederatedData) -> dict[str, Any]:
    """What a data set is in numbers: sizes, heterogeneity, and a picture of clients by classes."""
    sizes = data.partition.sizes
    told: dict[str, Any] = {
        "name": data.name,
        "clients": data.partition.clients,
        "train_examples": int(sizes.sum()),
        "test_examples": len(data.test),
        "classes": data.classes,
        "input_shape": list(data.input_shape),
        "client_examples": {
            "least": int(sizes.min()),
            "median": float(np.median(sizes)),
            "mean": round(float(sizes.mean()), 1),
            "most": int(sizes.max()),
        },
    }
    if data.classes and data.here:
        clients = _evenly(data.partition.clients, MEASURED)
        counts = label_counts(data, clients)
        told |= {"measured_clients": len(clients), **heterogeneity(counts), "picture": _picture(clients, counts)}
    return told


def label_counts(data: FederatedData, clients: np.ndarray) -> np.ndarray:
    """A row for each of the clients, a column for each class. In sequences every counted position is a label."""
    counts = np.zeros((len(clients), data.classes), dtype=np.int64)
    for row, client in enumerate(clients.tolist()):
        labels = data.train.targets[data.partition[client]].numpy().reshape(-1)
        counts[row] = np.bincount(labels, minlength=data.classes)
    counts[:, list(data.specials)] = 0
    return counts


def heterogeneity(counts: np.ndarray) -> dict[str, float]:
    """How unlike the clients' label mixes are.

    label_entropy       mean entropy of a client's mix in bits: 0 where each holds one class
    label_entropy_whole that of all together: what a client would have if all were alike
    label_distance      mean total variation between a client's mix and the whole: 0 alike, near 1 nothing in common
    """
    whole = counts.sum(0) / counts.sum()
    mixes = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return {
        "label_entropy": round(float(_entropy(mixes).mean()), 3),
        "label_entropy_whole": round(float(_entropy(whole[None])[0]), 3),
        "label_distance": round(float(np.abs(mixes - whole).sum(1).mean() / 2), 3),
    }


def _entropy(mixes: np.ndarray) -> np.ndarray:
    return -(mixes * np.log2(np.where(mixes > 0, mixes, 1))).sum(1)


def _picture(clients: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Some clients, in the order of the class that each has most of, by the classes there is most of."""
    rows = _evenly(len(clients), ROWS)
    columns = np.sort(np.argsort(-counts.sum(0), kind="stable")[:COLUMNS])
    shown = counts[np.ix_(rows, columns)]
    order = np.argsort(shown.argmax(1), kind="stable")
    return {
        "clients": clients[rows][order].tolist(),
        "classes": columns.tolist(),
        "counts": shown[order].tolist(),
        "examples": counts[rows].sum(1)[order].tolist(),
    }


def _evenly(many: int, most: int) -> np.ndarray:
    return np.arange(many) if many <= most else np.linspace(0, many - 1, most).astype(np.int64)
