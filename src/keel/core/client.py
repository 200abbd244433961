"""One client's round, whatever it runs on: the function that the engines call for each client.

The cohort engine runs the same steps for many clients as one batched program, from the same parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil
from types import EllipsisType

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.base import Algorithm, ClientContext, ClientState, Context, Gradient, Message, Path, State
from keel.core.choices import Autocast
from keel.core.client_state import RESERVED, algorithm_state
from keel.core.examples import ClientExamples
from keel.core.flat_model import FlatModel, Loss
from keel.core.mechanisms import MECHANISM, BroadcastMechanism, GradientMechanism, Mechanisms, Sender
from keel.core.optimizers import LocalOptimizer, PlainSGD, Steps
from keel.core.randomness import keyed_rng
from keel.core.replay import LocalGradient
from keel.core.torch_randomness import CPU, keyed_torch_rng, seed_torch
from keel.core.transforms import Identity, Transform
from keel.errors import KeelError

GATHERED = 1 << 22
"""How many input elements are gathered at a time."""


@dataclass(frozen=True)
class LocalConfig:
    """The amount of local training in a round, and the settings of a local step."""

    epochs: int | None
    steps: int | None
    batch: int
    drop_last: bool
    clip: float | None
    precision: Autocast = "float32"
    microbatch: int | None = None
    """Examples per forward pass, over which the gradient of a minibatch is accumulated; None for all at once."""

    def count(self, examples: int) -> int:
        """J, the number of local steps of a client with so many examples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * self._batches(examples)

    def order(self, examples: int, rng: np.random.Generator) -> np.ndarray:
        """The examples of all steps, one after another; each epoch has a new order."""
        sizes = self.sizes(examples)
        epochs = ceil(len(sizes) / self._batches(examples))
        used = sum(sizes[: self._batches(examples)])
        return np.concatenate([rng.permutation(examples)[:used] for _ in range(epochs)])[: sum(sizes)]

    def minibatches(self, examples: int, rng: np.random.Generator) -> list[np.ndarray]:
        """The examples of each step."""
        return np.split(self.order(examples, rng), np.cumsum(self.sizes(examples))[:-1])

    def sizes(self, examples: int) -> list[int]:
        """The number of examples of each step."""
        per_epoch = self._batches(examples)
        epoch = [self.batch] * (per_epoch - 1) + [min(self.batch, examples - (per_epoch - 1) * self.batch)]
        steps = self.count(examples)
        return (epoch * ceil(steps / per_epoch))[:steps]

    def _batches(self, examples: int) -> int:
        """Minibatches per epoch; a client with less than one full minibatch still has one."""
        return max(1, examples // self.batch) if self.drop_last else ceil(examples / self.batch)


@dataclass(frozen=True)
class LocalTraining:
    """What every client of a run does in every round."""

    algorithm: Algorithm
    loss: Loss
    config: LocalConfig
    seed: int
    transform: Transform = field(default_factory=Identity)
    chunk: int = 512
    """Examples per forward pass of a full gradient."""
    optimizer: LocalOptimizer = field(default_factory=PlainSGD)
    mechanisms: Mechanisms = field(default_factory=Mechanisms)
    """What changes a report before it leaves the client."""
    gradients: GradientMechanism | None = None
    """What takes the place of minibatches and their gradients."""
    downlink: BroadcastMechanism | None = None
    """What changes a broadcast before it leaves the server; None if it is sent as it is."""

    def init_client(self, theta: Tensor) -> ClientState:
        """A client's state before its first round: the algorithm's, the optimiser's if it is kept, the mechanisms'."""
        state = self.algorithm.init_client(theta)
        for name in state:
            if name.startswith(RESERVED):
                raise KeelError(
                    f"{type(self.algorithm).__name__}.init_client: the name {name!r} is reserved; rename it"
                )
        return {**state, **self.optimizer.init_client(theta), **self.mechanisms.init_client()}

    def send(self, result: "ClientResult", state: ClientState, round: int, client: int) -> "ClientResult":
        """The result as it leaves the client: with the message that the mechanisms make of its report, on the CPU.

        Args:
            state: The client's state before the round.
        """
        if not self.mechanisms:
            return result
        sender = Sender(self.seed, round, client)
        before = {name: value for name, value in state.items() if name.startswith(MECHANISM)}
        message, kept = self.mechanisms.encode(to_device(result.message, CPU), to_device(before, CPU), sender)
        return replace(result, message=message, state={**result.state, **kept})

    def send_probe(self, message: Message, round: int, client: int) -> Message:
        """The message of the first phase as it leaves the client."""
        if not self.mechanisms:
            return message
        return self.mechanisms.encode(to_device(message, CPU), {}, Sender(self.seed, round, client, "probe"))[0]

    def encoded_forms(self, down: list[Message], up: list[Message]) -> tuple[list[Message], list[Message]]:
        """The form in which the messages of a round travel, down and up. The last message up is the report."""
        *probes, report = up
        encoded = [*(self.mechanisms.encoded_form(probe, "probe") for probe in probes)]
        encoded.append(self.mechanisms.encoded_form(report))
        return down if self.downlink is None else [self.downlink.encoded_form(each) for each in down], encoded

    def minibatches(self, examples: int, round: int, client: int) -> list[np.ndarray]:
        if self.gradients is not None:
            rng = keyed_rng(self.seed, "minibatches", round, client)
            return self.gradients.minibatches(examples, self.config.count(examples), rng)
        return self.config.minibatches(examples, keyed_rng(self.seed, "minibatches", round, client))

    def order(self, examples: int, round: int, client: int) -> np.ndarray:
        """The examples of all steps, one after another."""
        return self.config.order(examples, keyed_rng(self.seed, "minibatches", round, client))

    def augmentations(self, examples: list[int], purpose: str, round: int, client: int) -> list[np.ndarray | None]:
        """The random choices of the transform for each minibatch, given the sizes of the minibatches."""
        if not self.transform.random:
            return [None] * len(examples)
        drawn = self.transform.draw(sum(examples), keyed_rng(self.seed, purpose, round, client))
        if drawn is None:
            return [None] * len(examples)
        return [*np.split(drawn, np.cumsum(examples)[:-1])]

    def gathered(
        self, examples: ClientExamples, minibatches: list[np.ndarray], round: int, client: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the transformed inputs and the targets of each minibatch, gathered for several steps at a time."""
        sizes = [len(indices) for indices in minibatches]
        drawn = self.augmentations([sum(sizes)], "preparation", round, client)[0]
        elements = max(1, examples.elements_per_example)
        first, used = 0, 0
        while first < len(sizes):
            end = first + 1
            while end < len(sizes) and not examples.variable and sum(sizes[first : end + 1]) * elements <= GATHERED:
                end += 1
            block = examples[np.concatenate(minibatches[first:end])]
            choices = None if drawn is None else drawn[used : used + len(block)]
            inputs = self.transform(block.inputs, choices)
            yield from zip(
                torch.split(inputs, sizes[first:end]), torch.split(block.targets, sizes[first:end]), strict=True
            )
            first, used = end, used + len(block)


@dataclass(frozen=True)
class ClientResult:
    """The result of a client's round: its message, its new state, and its mean training loss.

    The loss is not counted in the bytes of the round. The loop decides whether the model's `buffers` are sent or kept.
    """

    message: Message
    state: ClientState
    steps: int
    loss: Tensor
    buffers: Tensor | None = None

    def to(self, device: torch.device) -> "ClientResult":
        buffers = None if self.buffers is None else self.buffers.to(device)
        message, state = to_device(self.message, device), to_device(self.state, device)
        return ClientResult(message, state, self.steps, self.loss.to(device), buffers)


def to_device(tensors: Message, device: torch.device) -> Message:
    return {name: value.to(device) for name, value in tensors.items()}


class PathStatistics:
    """Sums the losses and, if asked for, the gradients along a path, from the first gradient of each step.

    For a batched cohort the sums have a row per client, and a step concerns the `active` rows.
    """

    def __init__(self, losses: Tensor, gradients: Tensor | None):
        self.losses, self.gradients = losses, gradients

    def begin_step(self, active: slice | EllipsisType = ...) -> None:
        self.active, self.first = active, True

    def __call__(self, losses: Tensor, gradients: Tensor) -> Tensor:
        if self.first:
            self.losses[self.active].add_(losses)
            if self.gradients is not None:
                self.gradients[self.active].add_(gradients)
            self.first = False
        return gradients


def train_client(
    local: LocalTraining,
    gradient_of: LocalGradient,
    client: int,
    examples: ClientExamples,
    received: Message,
    state: ClientState,
    round_ctx: Context,
    buffers: Tensor | None = None,
) -> ClientResult:
    """Run one client's round with the model of `gradient_of`, whose weights are overwritten."""
    algorithm, config, model = local.algorithm, local.config, gradient_of.model
    minibatches = local.minibatches(len(examples), round_ctx.round, client)
    steps = len(minibatches)
    ctx = round_ctx.for_client(steps)
    w, device = model.weights, model.weights.device
    kept, state = state, algorithm_state(state)
    w.copy_(algorithm.start(received, state, ctx))
    start = w.clone()
    model.set_buffers(buffers)
    with keyed_torch_rng(local.seed, "full", ctx.round, client, device=device):
        full = full_gradient(local, model, client, examples, ctx) if "full_gradient" in algorithm.observes else None
    model.set_buffers(buffers)  # again: the forward passes of a gradient may have changed them
    optimizer = local.optimizer.start(w, kept)
    step_state = algorithm.init_steps(received, state, ctx)
    statistics = PathStatistics(w.new_zeros(()), torch.zeros_like(w) if "mean_gradient" in algorithm.observes else None)

    sender, evaluations = Sender(local.seed, ctx.round, client), count()

    def step(number: int, inputs: Tensor, targets: Tensor) -> State:
        statistics.begin_step()

        def gradient(point: Tensor) -> Tensor:
            # a second gradient of a step has the same dropout as the first
            seed_torch(local.seed, "local", ctx.round, client, number, device=device)
            if local.gradients is None:
                loss, result = accumulated(gradient_of, config.microbatch, point, inputs, targets)
            else:
                loss, result = local.gradients.gradient(
                    model, local.loss, point, inputs, targets, sender, next(evaluations)
                )
            return statistics(loss, clip_norm_(result, config.clip))

        return local_step(algorithm, optimizer, w, gradient, received, state, step_state, ctx)

    with keyed_torch_rng(local.seed, "local", ctx.round, client, device=device):
        for number, (inputs, targets) in enumerate(local.gathered(examples, minibatches, ctx.round, client)):
            step_state = step(number, inputs.to(device), targets.to(device))
    mean = None if statistics.gradients is None else statistics.gradients.div_(steps)
    path = Path(start, w.clone(), mean_gradient=mean, full_gradient=full, step_state=step_state)
    with keyed_torch_rng(local.seed, "report", ctx.round, client, device=device):
        message, state = algorithm.report(path, received, state, ctx)
    result = ClientResult(
        message, {**state, **optimizer.client_state()}, steps, statistics.losses / steps, model.buffers()
    )
    return local.send(result, kept, ctx.round, client)


def probe_client(
    local: LocalTraining,
    model: FlatModel,
    client: int,
    examples: ClientExamples,
    received: Message,
    ctx: Context,
    buffers: Tensor | None = None,
) -> Message:
    """Run the first phase of a round, for algorithms that have one: the full gradient at the server's model."""
    with keyed_torch_rng(local.seed, "probe", ctx.round, client, device=model.weights.device):
        model.weights.copy_(received["theta"])
        model.set_buffers(buffers)
        message = {"gradient": full_gradient(local, model, client, examples, ctx)}
        return local.send_probe(message, ctx.round, client)


def full_gradient(
    local: LocalTraining, model: FlatModel, client: int, examples: ClientExamples, ctx: Context
) -> Tensor:
    """The gradient of the mean loss over all examples at the model's weights, computed in chunks.

    Examples are augmented as in training: minibatch gradients are unbiased estimates of its mean.
    """
    total = torch.zeros_like(model.weights)
    chunks = [np.arange(i, min(i + local.chunk, len(examples))) for i in range(0, len(examples), local.chunk)]
    drawn = local.augmentations([len(chunk) for chunk in chunks], "full preparation", ctx.round, client)
    for chunk, augmentation in zip(chunks, drawn, strict=True):
        batch = examples[chunk]
        inputs, targets = local.transform(batch.inputs, augmentation).to(total.device), batch.targets.to(total.device)
        losses = local.loss(model.outputs(inputs), targets)
        total.add_(model.gradient(losses.sum() / len(examples)))
    return total


def local_step(
    algorithm: Algorithm,
    optimizer: Steps,
    w: Tensor,
    gradient: Gradient,
    received: Message,
    state: ClientState,
    step_state: State,
    ctx: ClientContext,
) -> State:
    """Take one local step on `w` in place: the optimiser's step along u, plus the displacement d.

    Returns:
        The new step state.
    """
    known = {**state, **step_state} if step_state else state
    u = algorithm.direction(w, gradient, received, known, ctx)
    if isinstance(u, tuple):
        u, new = u
        if new.keys() != step_state.keys():
            raise KeelError(
                f"{type(algorithm).__name__}.direction must return a step state with the names of init_steps, "
                f"{sorted(step_state)} (got {sorted(new)})"
            )
        step_state = {name: value.clone() for name, value in new.items()}  # w and the gradient are overwritten
    d = algorithm.displacement(w, received, known, ctx)
    optimizer.step(w, u, ctx.lr)
    if d is not None:
        w.add_(d)
    return step_state


def accumulated(
    gradient_of: LocalGradient, microbatch: int | None, point: Tensor, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of a minibatch and its gradient, computed on at most `microbatch` examples at a time."""
    count = len(targets)
    if microbatch is None or count <= microbatch:
        return gradient_of(point, inputs, targets)
    total, sum_of_gradients = point.new_zeros(()), torch.zeros_like(point)
    for some, of_them in zip(torch.split(inputs, microbatch), torch.split(targets, microbatch), strict=True):
        loss, gradient = gradient_of(point, some, of_them)
        total.add_(loss, alpha=len(of_them) / count)
        sum_of_gradients.add_(gradient, alpha=len(of_them) / count)
    return total, sum_of_gradients


def clip_norm_(gradient: Tensor, limit: float | None) -> Tensor:
    """Scale each row (or the one vector) down, in place, to a norm of at most `limit`."""
    if limit is not None:
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        gradient.mul_((limit / norm).clamp_(max=1.0))
    return gradient
