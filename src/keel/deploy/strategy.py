"""Keel's algorithms in a Flower app of the user's own: a strategy for the server, a mod and an optimiser for clients.

The app keeps its own loop, model and data: its clients step with `LocalSGD`, and the mod sends what the algorithm
reports in the place of the model.
"""

import logging
import tomllib
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path as FilePath
from statistics import fmean
from typing import Any
from uuid import uuid4

import tomli_w
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from platformdirs import user_data_path
from torch import Tensor, nn

from keel.algorithms import Algorithm, make_algorithm, messages_of
from keel.algorithms.base import ClientContext, Memory, Path, Report, State
from keel.algorithms.base import Context as RoundContext
from keel.algorithms.base import Message as Tensors
from keel.client import descend
from keel.deploy import messages
from keel.deploy.memory import SiteMemory
from keel.errors import KeelError
from keel.memories import Form, form_of

log = logging.getLogger("flwr")


class KeelStrategy(FedAvg):
    """A Keel algorithm as a Flower strategy. Sampling, evaluation and metrics are as in Flower's FedAvg.

    `lr` is the clients' learning rate: they learn it from the server, for the algorithm may need it too.
    """

    def __init__(self, algorithm: str, *, lr: float, server_lr: float = 1.0, settings: Any = None, **flower: Any):
        super().__init__(**flower)
        self.algorithm = make_algorithm(algorithm, **(settings or {}))
        if self.algorithm.probes or self.algorithm.pooled or "full_gradient" in self.algorithm.observes:
            raise KeelError(f"algorithm: {algorithm!r} needs full gradients; accepted here: one that needs none")
        if getattr(self.algorithm, "anchor", "own") == "shared_init":
            raise KeelError(
                "algorithm.anchor: 'shared_init', which a node that joins later does not have; accepted: 'own'"
            )
        self.rule = tomli_w.dumps({"name": algorithm, **self.algorithm.settings()})
        self.lr, self.server_lr, self.training = lr, server_lr, uuid4().hex
        self.server: State | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.form: Form = {}
        self.counted: dict[int, int] = {}
        self.known: set[int] = set()
        self.examples: dict[int, int] = {}
        self.ctx: RoundContext | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        if self.server is None:
            self.shapes = {name: array.shape for name, array in arrays.items()}
            self.server = self.algorithm.init_server(theta := _flat(arrays))
            self.form = form_of(messages_of(self.algorithm, torch.zeros_like(theta))[1][-1])
        wanted = max(int(len(list(grid.get_node_ids())) * self.fraction_train), self.min_train_nodes)
        chosen, online = sample_nodes(grid, self.min_available_nodes, wanted)
        self.known.update(online)
        everyone, cohort = len(self.known), len(chosen)
        self.ctx = RoundContext(
            server_round, everyone, cohort, self._share(chosen), everyone / cohort, self.lr, self.server_lr
        )
        sent = self.algorithm.broadcast(self.server, self.ctx)
        shared: dict[str, Any] = {
            self.arrayrecord_key: _shaped(sent["theta"], self.shapes),
            self.configrecord_key: ConfigRecord({**config, "server-round": server_round}),
            messages.TENSORS: messages.pack({name: value for name, value in sent.items() if name != "theta"}),
        }
        known = {"rule": self.rule, "training": self.training, **vars(self.ctx)}
        return [
            Message(
                RecordDict({**shared, messages.ASKED: ConfigRecord({**known, "last": self.counted.get(node, 0)})}),
                node,
                MessageType.TRAIN,
            )
            for node in sorted(chosen)
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self.server is not None
        assert self.ctx is not None
        usable: dict[int, tuple[Tensors, int, int, RecordDict]] = {}
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise messages.Broken(reply.error.reason)
                usable[node] = self._read(reply.content, server_round)
                self.counted[node], self.examples[node] = server_round, usable[node][1]
            except messages.Broken as error:
                log.warning("round %d: node %d is set aside: %s", server_round, node, error)
        if not usable:
            return None, None
        total = sum(examples for _, examples, _, _ in usable.values())
        reports = [Report(message, examples / total, steps) for message, examples, steps, _ in usable.values()]
        ctx = replace(self.ctx, cohort=len(usable), share=self._share(usable))
        self.server = self.algorithm.aggregate(self.server, reports, ctx)
        metrics = self.train_metrics_aggr_fn([content for *_, content in usable.values()], self.weighted_by_key)
        return _shaped(self.server["theta"], self.shapes), metrics

    def _share(self, nodes: Iterable[int]) -> float:
        """Their share of all known nodes' examples; a node that never told how many it has counts as the mean."""
        usual = fmean(self.examples.values()) if self.examples else 1.0
        held = {node: self.examples.get(node, usual) for node in self.known}
        return sum(held[node] for node in nodes) / sum(held.values())

    def _read(self, content: RecordDict, round: int) -> tuple[Tensors, int, int, RecordDict]:
        told = messages.told(content, round, self.training)
        message = messages.unpack(content, self.form)
        own = RecordDict({name: record for name, record in content.metric_records.items() if name != messages.TOLD})
        weights = [
            record[self.weighted_by_key] for record in own.metric_records.values() if self.weighted_by_key in record
        ]
        if len(weights) != 1 or type(weights[0]) is not int or weights[0] < 1:
            raise messages.Broken(f"{self.weighted_by_key} is {weights}")
        return message, weights[0], messages.count(told, "steps", 1), own


@dataclass
class _Round:
    """What a client's round needs to know, and what its optimiser saw."""

    algorithm: Algorithm
    received: Tensors
    memory: Memory
    ctx: RoundContext
    optimiser: "LocalSGD | None" = field(default=None, repr=False)


_ROUND: ContextVar[_Round] = ContextVar("keel round")


class LocalSGD(torch.optim.Optimizer):
    """SGD whose steps the algorithm directs. `steps` is how many there will be in this round.

    `step` needs a closure, as PyTorch's LBFGS does: it sets the gradients to zero, computes the loss on the minibatch,
    calls `backward` and returns the loss. The learning rate is the server's.
    """

    def __init__(self, model: nn.Module, steps: int, weight_decay: float = 0.0):
        try:
            self.round = _ROUND.get()
        except LookupError:
            raise KeelError(
                "LocalSGD: outside of a round of Keel's; accepted: in a ClientApp with keel_mod()"
            ) from None
        self.tensors = list(model.parameters())
        self.w = torch.cat([p.detach().reshape(-1) for p in self.tensors])
        if self.w.numel() != self.round.received["theta"].numel():
            raise KeelError(
                f"LocalSGD: {self.w.numel()} parameters, but the server's arrays have "
                f"{self.round.received['theta'].numel()}; accepted: a model without buffers that training changes"
            )
        super().__init__(self.tensors, {})
        device = self.w.device
        self.received = {name: value.to(device) for name, value in self.round.received.items()}
        self.memory = {name: value.to(device) for name, value in self.round.memory.items()}
        self.w.copy_(self.received["theta"])
        self._look_at(self.w)
        self.ctx: ClientContext = self.round.ctx.for_client(steps)
        self.weight_decay, self.taken, self.gradients = weight_decay, 0, torch.zeros_like(self.w)
        self.loss = 0.0
        self.round.optimiser = self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            raise KeelError("LocalSGD: step() without a closure; accepted: step(closure), which computes the loss")
        losses: list[Tensor] = []

        def gradient(point: Tensor) -> Tensor:
            self._look_at(point)
            with torch.enable_grad():
                loss = closure()
            found = torch.cat(
                [(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in self.tensors]
            )
            if not losses:
                self.gradients.add_(found)
            losses.append(loss.detach())
            self._look_at(self.w)
            return found

        with torch.no_grad():
            u = self.round.algorithm.direction(self.w, gradient, self.received, self.memory, self.ctx)
            descend(self.w, u, self.ctx.lr, self.weight_decay)
        self.taken += 1
        self.loss += float(losses[0])
        return losses[0]

    def _look_at(self, point: Tensor) -> None:
        for parameter, part in zip(self.tensors, torch.split(point, [p.numel() for p in self.tensors]), strict=True):
            parameter.data = part.view(parameter.shape)

    def report(self) -> tuple[Tensors, Memory]:
        if self.taken != self.ctx.steps:
            raise KeelError(f"LocalSGD: {self.taken} steps were taken of steps={self.ctx.steps}; accepted: as many")
        path = Path(self.received["theta"], self.w.clone(), mean_gradient=self.gradients / self.taken)
        return self.round.algorithm.report(path, self.received, self.memory, self.ctx)


def keel_mod() -> Mod:
    """The mod for a ClientApp whose server has a KeelStrategy. It keeps the client's memory in the node's `memory`."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        content = message.content
        if messages.ASKED not in content.config_records:
            return call_next(message, context)
        asked = content.config_records[messages.ASKED]
        arrays = next(record for name, record in content.array_records.items() if name != messages.TENSORS)
        algorithm = make_algorithm(**tomllib.loads(str(asked["rule"])))
        theta, last = _flat(arrays), int(str(asked["last"]))
        folder = context.node_config.get("memory", user_data_path("keel") / f"node-{context.node_id}")
        store = SiteMemory(FilePath(str(folder)), str(asked["training"]))
        known = store.of(last) if last else None
        received = {"theta": theta, **messages.received(content)}
        round = _Round(algorithm, received, known or algorithm.init_client(theta), messages.context_of(asked))
        token = _ROUND.set(round)
        try:
            reply = call_next(message, context)
        finally:
            _ROUND.reset(token)
        if round.optimiser is None:
            raise KeelError("keel_mod: no LocalSGD was made in this round; accepted: an app that trains with it")
        sent, memory = round.optimiser.report()
        if memory:
            store.keep(round.ctx.round, {name: value.cpu() for name, value in memory.items()}, last)
        steps, loss = round.optimiser.taken, round.optimiser.loss
        told: dict[str, Any] = {"steps": steps, "loss": loss / steps}
        reply.content = RecordDict(
            {
                **reply.content.metric_records,
                messages.TENSORS: messages.pack(sent),
                messages.TOLD: MetricRecord(told),
                messages.ASKED: ConfigRecord({"training": asked["training"], "round": asked["round"]}),
            }
        )
        return reply

    return mod


def _flat(arrays: ArrayRecord) -> Tensor:
    """The arrays of a model as one vector, in their order."""
    parts = []
    for name, array in arrays.items():
        if array.dtype != "float32":
            raise KeelError(f"arrays: {name} is {array.dtype}; accepted: float32, and no counters of BatchNorm")
        parts.append(torch.from_numpy(array.numpy().copy()).reshape(-1))
    return torch.cat(parts)


def _shaped(theta: Tensor, shapes: dict[str, tuple[int, ...]]) -> ArrayRecord:
    parts = torch.split(theta, [prod(shape) for shape in shapes.values()])
    return ArrayRecord({name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)})
