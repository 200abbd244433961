"""The label distribution of the clients, as sentences and as a chart of block characters."""

from math import ceil
from textwrap import shorten
from typing import Any

import numpy as np

from keel.units import percent

SHADES = " ░▒▓█"
MARGIN = 12
"""Columns left of the chart, for the names of the clients."""


def heterogeneity(statistics: dict[str, Any]) -> str:
    """Describe the clients of a data set: sizes, classes, and how their label distributions differ."""
    sizes = statistics["client_examples"]
    examples = f"{sizes['least']:,} to {sizes['most']:,} examples each (median {sizes['median']:,.0f})"
    if sizes["least"] == sizes["most"]:
        examples = f"{sizes['least']:,} examples each"
    return (
        f"{statistics['name']}{statistics.get('split', '')}: {statistics['clients']:,} clients with {examples}; "
        f"{statistics['train_examples']:,} training and {statistics['test_examples']:,} test examples, "
        f"{statistics['classes']:,} classes. Label entropy: {statistics['label_entropy']:.2f} bits per client on "
        f"average, {statistics['label_entropy_whole']:.2f} bits over all clients. Mean distance between a client's "
        f"label distribution and that of all clients: {statistics['label_distance']:.2f} (0: equal, 1: disjoint)."
    )


def picture_labels(picture: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the labels of the clients and of the classes of a picture: their names if they have any, or numbers."""
    clients, classes = picture.get("client_names", picture["clients"]), picture.get("class_names", picture["classes"])
    return [str(client) for client in clients], [str(label) for label in classes]


def label_chart(statistics: dict[str, Any], width: int, max_clients: int = 20) -> str:
    """Draw clients by classes in blocks: the darker, the larger the share of the class in the client's examples."""
    drawn = statistics["picture"]
    clients_drawn, classes = picture_labels(drawn)
    counts = drawn["counts"]
    block = max(1, min(3, (width - MARGIN) // len(classes)))
    groups = np.array_split(np.arange(len(classes)), min(len(classes), width - MARGIN))
    clients = np.linspace(0, len(counts) - 1, min(max_clients, len(counts))).astype(int)
    totals = np.maximum(1, np.array(drawn["examples"]))
    shares = np.array([[np.array(counts[i])[group].sum() / totals[i] for group in groups] for i in clients])
    largest = shares.max()
    lines = [
        f"{clients_drawn[i][:10]:>10}  " + "".join(SHADES[ceil(4 * share / largest)] * block for share in row)
        for i, row in zip(clients, shares, strict=True)
    ]
    title = f"{'client':>10}  classes {classes[0]} to {classes[-1]}; █ is {percent(largest)} of a client's examples"
    end = [f"{'':{MARGIN}}{len(clients)} of {statistics['clients']:,} clients"]
    if classes != [str(label) for label in drawn["classes"]]:
        named = (f"{label} {name}" for label, name in zip(drawn["classes"], classes, strict=True))
        end.append(shorten(f"classes: {', '.join(named)}", width, placeholder=" ..."))
    return "\n".join([title, *lines, *end])
