"""A Keel algorithm as a Flower strategy, for the server of another Flower app. Its clients use `LocalSGD`."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from statistics import fmean
from typing import Any, NamedTuple
from uuid import uuid4

import tomli_w
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from keel.algorithms import make_algorithm, messages_of
from keel.algorithms.base import Context, Report, State
from keel.algorithms.base import Message as Tensors
from keel.core.client_state import Signature, signature_of
from keel.deploy import messages
from keel.deploy.flower_adapter import log, sample_nodes
from keel.deploy.invalid_reply import InvalidReply
from keel.deploy.model_arrays import flatten_arrays, split_into_arrays
from keel.errors import KeelError


class NodeReply(NamedTuple):
    """A node's valid reply."""

    message: Tensors
    examples: int
    steps: int
    metrics: RecordDict


class KeelStrategy(FedAvg):
    """A Keel algorithm as a Flower strategy. Sampling, evaluation and metrics are those of Flower's FedAvg.

    Args:
        algorithm: Name of the algorithm, as in `keel algorithms`.
        lr: Learning rate of the clients. The server sends it to them, because some algorithms need it on both sides.
        server_lr: Learning rate of the server.
        settings: Hyper-parameters of the algorithm.
        **flower: Arguments of Flower's FedAvg.
    """

    def __init__(self, algorithm: str, *, lr: float, server_lr: float = 1.0, settings: Any = None, **flower: Any):
        super().__init__(**flower)
        self.algorithm = make_algorithm(algorithm, **(settings or {}))
        if self.algorithm.probes or self.algorithm.pooled or "full_gradient" in self.algorithm.observes:
            raise KeelError(f"KeelStrategy supports only algorithms without full gradients (got {algorithm!r})")
        if getattr(self.algorithm, "anchor", "own") == "shared_init":
            raise KeelError(
                "algorithm.anchor must be 'own' (got 'shared_init'): a node that joins later has no initial model"
            )
        self.algorithm_toml = tomli_w.dumps({"name": algorithm, **self.algorithm.settings()})
        self.lr, self.server_lr, self.training = lr, server_lr, uuid4().hex
        self.server: State | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.report_signature: Signature = {}
        self.last_rounds: dict[int, int] = {}
        """The last round in which each node's reply was valid."""
        self.nodes: set[int] = set()
        """Every node that was online in some round."""
        self.examples: dict[int, int] = {}
        self.ctx: Context | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Sample the round's nodes and make the message to each."""
        if self.server is None:
            self.shapes = {name: array.shape for name, array in arrays.items()}
            self.server = self.algorithm.init_server(theta := flatten_arrays(arrays))
            down, up = messages_of(self.algorithm, torch.zeros_like(theta), self._sizes)
            if "theta" not in down[0]:
                raise KeelError(
                    f"KeelStrategy supports only algorithms that send the whole model (got {self.algorithm.name!r})"
                )
            self.report_signature = signature_of(up[-1])
        sample_size = max(int(len(list(grid.get_node_ids())) * self.fraction_train), self.min_train_nodes)
        cohort, online = sample_nodes(grid, self.min_available_nodes, sample_size)
        self.nodes.update(online)
        period = len(self.nodes) / len(cohort)
        share = self._share_of_examples(cohort)
        self.ctx = Context(
            server_round, len(self.nodes), len(cohort), share, period, self.lr, self.server_lr, sizes=self._sizes
        )
        broadcast = self.algorithm.broadcast(self.server, self.ctx)
        shared: dict[str, Any] = {
            self.arrayrecord_key: split_into_arrays(broadcast["theta"], self.shapes),
            self.configrecord_key: ConfigRecord({**config, "server-round": server_round}),
            messages.TENSORS: messages.pack({name: value for name, value in broadcast.items() if name != "theta"}),
        }
        request = {"algorithm": self.algorithm_toml, "training": self.training, **messages.request_of(self.ctx)}

        def message_to(node: int) -> Message:
            record = ConfigRecord({**request, "last_round": self.last_rounds.get(node, 0)})
            return Message(RecordDict({**shared, messages.REQUEST: record}), node, MessageType.TRAIN)

        return [message_to(node) for node in sorted(cohort)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies in the order of the nodes' IDs."""
        assert self.server is not None
        assert self.ctx is not None
        valid: dict[int, NodeReply] = {}
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise InvalidReply(reply.error.reason)
                valid[node] = self._read_reply(reply.content, server_round)
            except InvalidReply as error:
                log.warning("round %d: dropped node %d: %s", server_round, node, error)
                continue
            self.last_rounds[node], self.examples[node] = server_round, valid[node].examples
        if not valid:
            return None, None
        total = sum(reply.examples for reply in valid.values())
        reports = [Report(reply.message, reply.examples / total, reply.steps) for reply in valid.values()]
        ctx = replace(self.ctx, cohort=len(valid), share=self._share_of_examples(valid))
        self.server = self.algorithm.aggregate(self.server, reports, ctx)
        metrics = self.train_metrics_aggr_fn([reply.metrics for reply in valid.values()], self.weighted_by_key)
        return split_into_arrays(self.server["theta"], self.shapes), metrics

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The number of elements of each array of the model."""
        return tuple(prod(shape) for shape in self.shapes.values())

    def _share_of_examples(self, nodes: Iterable[int]) -> float:
        """Return these nodes' share of all examples. A node that has not replied yet counts with the mean."""
        mean = fmean(self.examples.values()) if self.examples else 1.0
        examples = {node: self.examples.get(node, mean) for node in self.nodes}
        return sum(examples[node] for node in nodes) / sum(examples.values())

    def _read_reply(self, content: RecordDict, round: int) -> NodeReply:
        numbers = messages.reply_numbers(content, round, self.training)
        message = messages.unpack_reply(content, self.report_signature)
        metrics = RecordDict({n: record for n, record in content.metric_records.items() if n != messages.REPLY})
        weights = [
            record[self.weighted_by_key] for record in metrics.metric_records.values() if self.weighted_by_key in record
        ]
        if len(weights) != 1 or type(weights[0]) is not int or weights[0] < 1:
            raise InvalidReply(f"{self.weighted_by_key} must be one positive integer (got {weights})")
        return NodeReply(message, weights[0], messages.read_integer(numbers, "steps", 1), metrics)
