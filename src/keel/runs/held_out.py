"""Holds examples out of training: to select settings on, or to evaluate each client on its own."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from keel.config.schema import EvaluationSpec
from keel.core.client_tests import ClientTests
from keel.core.examples import FederatedData, Partition
from keel.core.randomness import keyed_rng
from keel.errors import KeelError

HELD_OUT_SHARE = 0.2
"""The share of a client's examples that is held out, rounded down."""


def hold_out_validation(data: FederatedData, seed: int) -> FederatedData:
    """Replace the test examples by a fifth of each client's training examples, to select settings on."""
    kept, rows, sizes = _split(data, seed, "validation")
    if len(rows) == 0:
        raise KeelError("evaluation.on = 'validation' requires a client with at least five examples; use 'test'")
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return replace(data, test=data.train.subset(rows), partition=kept, sha256=data.fingerprint(), test_clients=owners)


def hold_out_clients(
    data: FederatedData, evaluation: EvaluationSpec, seed: int, lr: float
) -> tuple[FederatedData, ClientTests]:
    """Return the data to train on, and the held-out examples of `evaluation.clients` clients, drawn at random.

    Test examples that belong to clients are used; otherwise a fifth of each client's training examples is held out.
    """
    if data.test_clients is None:
        kept, rows, sizes = _split(data, seed, "client tests")
        tests = data.train.subset(rows)
        data = replace(data, partition=kept, sha256=data.fingerprint())
        owners, positions = np.repeat(np.arange(len(sizes)), sizes), np.arange(len(rows))
    else:
        tests, owners = data.test, data.test_clients
        positions = np.argsort(owners, kind="stable")
        owners = owners[positions]
    clients, firsts = np.unique(owners, return_index=True)
    if len(clients) == 0:
        raise KeelError("evaluation.clients requires a client with at least five examples; leave it out")
    chosen = np.sort(keyed_rng(seed, "evaluated clients").permutation(len(clients))[: evaluation.clients])
    parts = np.split(positions, firsts[1:])
    partition = Partition.of([parts[client] for client in chosen])
    return data, ClientTests(tests, clients[chosen], partition, evaluation.finetune_steps or 0, lr)


def _split(data: FederatedData, seed: int, purpose: str) -> tuple[Partition, np.ndarray, np.ndarray]:
    """Return the partition of the examples that are kept, the rows that are held out, and how many of each client."""
    partition, rng = data.partition, keyed_rng(seed, purpose)
    shuffled = partition.indices.copy()
    for first, end in pairwise(partition.offsets.tolist()):
        rng.shuffle(shuffled[first:end])
    cuts = (partition.sizes * HELD_OUT_SHARE).astype(np.int64)
    rank = np.arange(len(shuffled)) - np.repeat(partition.offsets[:-1], partition.sizes)
    held_out = rank < np.repeat(cuts, partition.sizes)
    kept = Partition(shuffled[~held_out], np.concatenate([[0], np.cumsum(partition.sizes - cuts)]))
    return kept, shuffled[held_out], cuts
