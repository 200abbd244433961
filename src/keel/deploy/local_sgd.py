"""Keel's algorithms in the clients of another Flower app, whose server has a `KeelStrategy`.

The app keeps its training loop, model and data. It takes its steps with `LocalSGD`, and `keel_mod` replaces the model
in the reply by the algorithm's report.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from keel.algorithms import Algorithm, make_algorithm, messages_of
from keel.algorithms.base import ClientContext, ClientState, Path
from keel.algorithms.base import Context as RoundContext
from keel.algorithms.base import Message as Tensors
from keel.core.client import local_step
from keel.core.client_state import signature_of
from keel.core.optimizers import PlainSGD
from keel.deploy import messages
from keel.deploy.model_arrays import flatten_arrays
from keel.deploy.request_fields import origin_of, read_integer, read_table, read_text
from keel.deploy.site_state import SiteState
from keel.deploy.state_folder import state_folder
from keel.errors import KeelError

ClientAppCallable = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientAppCallable], Message]


@dataclass
class _Round:
    """What a client needs for a round, and the optimiser that the app made for it."""

    algorithm: Algorithm
    received: Tensors
    state: ClientState
    ctx: RoundContext
    optimiser: "LocalSGD | None" = field(default=None, repr=False)


_ROUND: ContextVar[_Round] = ContextVar("keel round")


class LocalSGD(torch.optim.Optimizer):
    """SGD whose update direction comes from the algorithm. The learning rate is the server's.

    `step` requires a closure, as PyTorch's LBFGS does: it sets the gradients to zero, computes the loss on the
    minibatch, calls `backward` and returns the loss.

    Args:
        model: The model to train. It must have no buffers among the server's arrays.
        steps: Number of local steps in this round.
        weight_decay: L2 coefficient, as in torch.optim.SGD.
    """

    def __init__(self, model: nn.Module, steps: int, weight_decay: float = 0.0):
        try:
            self.round = _ROUND.get()
        except LookupError:
            raise KeelError("LocalSGD requires a round of a KeelStrategy; use ClientApp(mods=[keel_mod()])") from None
        self.parameters = list(model.parameters())
        self.w = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        expected = self.round.received["theta"].numel()
        if self.w.numel() != expected:
            raise KeelError(
                f"LocalSGD: the model has {self.w.numel()} parameters, but the server's arrays have {expected}; "
                "a model whose buffers change in training is not supported"
            )
        super().__init__(self.parameters, {})
        device = self.w.device
        self.received = {name: value.to(device) for name, value in self.round.received.items()}
        self.client_state = {name: value.to(device) for name, value in self.round.state.items()}
        self.ctx: ClientContext = self.round.ctx.for_client(steps)
        self.w.copy_(self.round.algorithm.start(self.received, self.client_state, self.ctx))
        self.start = self.w.clone()
        self._point_parameters_to(self.w)
        self.sgd, self.steps_taken = PlainSGD(weight_decay), 0
        self.step_state = self.round.algorithm.init_steps(self.received, self.client_state, self.ctx)
        self.gradient_sum, self.loss_sum = torch.zeros_like(self.w), 0.0
        self.round.optimiser = self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one local step and return the loss before it."""
        if closure is None:
            raise KeelError("LocalSGD.step requires a closure that computes the loss; call step(closure)")
        losses: list[Tensor] = []

        def gradient(point: Tensor) -> Tensor:
            """Return the minibatch gradient at a point, which algorithms may choose away from the local model."""
            self._point_parameters_to(point)
            with torch.enable_grad():
                loss = closure()
            value = torch.cat(
                [(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in self.parameters]
            )
            if not losses:
                self.gradient_sum.add_(value)
            losses.append(loss.detach())
            self._point_parameters_to(self.w)
            return value

        with torch.no_grad():
            self.step_state = local_step(
                self.round.algorithm,
                self.sgd,
                self.w,
                gradient,
                self.received,
                self.client_state,
                self.step_state,
                self.ctx,
            )
        self.steps_taken += 1
        self.loss_sum += float(losses[0])
        return losses[0]

    def _point_parameters_to(self, vector: Tensor) -> None:
        """Make the model's parameters views of a flat vector."""
        parts = torch.split(vector, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.data = part.view(parameter.shape)

    def report(self) -> tuple[Tensors, ClientState]:
        """Return the algorithm's message to the server and the new client state."""
        if self.steps_taken != self.ctx.steps:
            raise KeelError(f"LocalSGD took {self.steps_taken} steps, but was made with steps={self.ctx.steps}")
        mean_gradient = self.gradient_sum / self.steps_taken
        path = Path(self.start, self.w.clone(), mean_gradient=mean_gradient, step_state=self.step_state)
        return self.round.algorithm.report(path, self.received, self.client_state, self.ctx)


def keel_mod() -> Mod:
    """Make the mod of a ClientApp whose server has a KeelStrategy.

    It keeps the client state in the folder that the node's configuration names `state-dir`.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        content = message.content
        if messages.REQUEST not in content.config_records:  # not a message of a KeelStrategy
            return call_next(message, context)
        request = content.config_records[messages.REQUEST]
        origin, last_round = origin_of(request), read_integer(request, "last_round")
        store = SiteState(state_folder(context.node_config, f"node-{context.node_id}"), read_text(request, "training"))
        round = _start_round(content, request, store.load(last_round) if last_round else None)
        token = _ROUND.set(round)
        try:
            reply = call_next(message, context)
        finally:
            _ROUND.reset(token)
        if round.optimiser is None:
            raise KeelError("keel_mod: the app made no LocalSGD in this round; train with it")
        report, state = round.optimiser.report()
        if state:
            store.save(round.ctx.round, {name: value.cpu() for name, value in state.items()}, last_round)
        steps = round.optimiser.steps_taken
        numbers: dict[str, Any] = {"steps": steps, "loss": round.optimiser.loss_sum / steps}
        reply.content = RecordDict(
            {
                **reply.content.metric_records,
                messages.TENSORS: messages.pack(report),
                messages.REPLY: MetricRecord(numbers),
                messages.REQUEST: origin,
            }
        )
        return reply

    return mod


def _start_round(content: RecordDict, request: ConfigRecord, state: ClientState | None) -> _Round:
    arrays = next((record for name, record in content.array_records.items() if name != messages.TENSORS), None)
    if not arrays:
        raise KeelError("the request has no arrays of the model")
    settings = read_table(request, "algorithm")
    algorithm = make_algorithm(read_text(settings, "name"), **{k: v for k, v in settings.items() if k != "name"})
    theta, sizes = flatten_arrays(arrays), tuple(prod(array.shape) for array in arrays.values())
    (broadcast, *_), _ = messages_of(algorithm, torch.zeros_like(theta), sizes)
    expected = signature_of({name: tensor for name, tensor in broadcast.items() if name != "theta"})
    received = {"theta": theta, **messages.unpack_request(content, expected)}
    if missing := sorted(expected.keys() - received.keys()):
        raise KeelError(f"the request has no tensor {missing[0]!r}")
    return _Round(algorithm, received, state or algorithm.init_client(theta), messages.round_context(request, sizes))
