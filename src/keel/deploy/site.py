"""What a site does: answers the server's messages with what its algorithm says, from its own data and its own memory.

Flower starts a fresh process for each message, so that nothing is loaded before it is needed.
"""

import logging
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from platformdirs import user_data_path
from torch import Tensor, nn

from keel.client import moved, probe_client, train_client
from keel.data.arrays import examples
from keel.data.federated import Examples, FederatedData, Partition
from keel.deploy import messages
from keel.deploy.memory import SiteMemory
from keel.devices import find_device
from keel.engines.base import CPU
from keel.errors import KeelError
from keel.evaluation import Evaluator
from keel.params import FlatModel, Loss, state_fingerprint
from keel.randomness import torch_draws
from keel.rounds import BUFFERS, make_recipe
from keel.runs.spec import Spec, resolved_spec
from keel.task import Task, make_task

log = logging.getLogger("flwr")

Model = Callable[[], nn.Module]
Arrays = tuple[Any, Any]
SiteData = FederatedData | tuple[Arrays, Arrays | None] | Arrays
"""(inputs, labels), or ((inputs, labels), (test inputs, test labels)), or federated data of one client."""
Loader = Callable[[Mapping[str, Any]], SiteData]
"""From the node's own settings (`--node-config`) to its data."""

UNTESTED = "site without test examples"


def client_app(model: Model, data: Loader, *, loss: Loss | None = None) -> ClientApp:
    """The Flower app of a site: `model` gives the model, `data` the site's examples from its settings."""
    app = ClientApp()

    def answering(answer: Callable[[Site, RecordDict], RecordDict]) -> Callable[[Message, Context], Message]:
        def reply(message: Message, context: Context) -> Message:
            with discreet():
                asked = message.content.config_records[messages.ASKED]
                site = Site(model, data, loss, asked, context.node_config)
                return Message(answer(site, message.content), reply_to=message)

        return reply

    app.query()(answering(Site.describe))
    app.train("probe")(answering(Site.probe))
    app.train()(answering(Site.train))
    app.evaluate()(answering(Site.evaluate))
    return app


@contextmanager
def discreet() -> Iterator[None]:
    """An error's text may quote an example, and Flower sends it to the server: only Keel's own texts leave the site."""
    try:
        yield
    except KeelError:
        raise
    except Exception as error:
        log.exception("this site could not answer")
        raise RuntimeError(f"{type(error).__name__}, of which the site's log says more") from None


class Site:
    """One site, for one message."""

    def __init__(self, model: Model, data: Loader, loss: Loss | None, asked: ConfigRecord, node: Mapping[str, Any]):
        self.asked, self.node = asked, node
        self.spec = spec_of(str(asked["spec"]))
        self.number = site_number(node)
        if asked.get("site", self.number) != self.number:
            raise KeelError(f"site: this is {self.number}, but {asked['site']!r} was asked; accepted: its own number")
        self.device = find_device(str(node.get("device", "auto")))
        torch.set_num_threads(int(node.get("threads", 1)))  # one: how a sum is split over threads changes its bits
        self._model, self._data, self._loss = model, data, loss

    @cached_property
    def task(self) -> Task:
        module = initial_model(self._model, self.spec)
        return make_task(self.spec, module=module, data=as_data(self._data(self.node), module), loss=self._loss)

    @cached_property
    def flat(self) -> FlatModel:
        return FlatModel(self.task.module.to(self.device), self.task.moving)

    @property
    def memory(self) -> SiteMemory:
        folder = Path(str(self.node.get("memory", user_data_path("keel") / f"site-{self.number}")))
        return SiteMemory(folder, str(self.asked["training"]), self.spec.memory.precision)

    def describe(self, content: RecordDict) -> RecordDict:
        """What the server has to know before the first round: how much there is here, and of what shape."""
        task = self.task
        told = ConfigRecord(
            {
                "site": self.number,
                "examples": int(task.data.partition.sizes[0]),
                "shape": list(task.data.train.inputs.shape[1:]),
                "target_shape": list(task.data.train.targets.shape[1:]),
                "classes": task.data.classes,
                "moving": list(task.moving),
                "model": state_fingerprint(task.module),
            }
        )
        return RecordDict({messages.TOLD: told})

    def probe(self, content: RecordDict) -> RecordDict:
        sent, ctx = messages.received(content), messages.context_of(self.asked)
        self.memory.keep_received(ctx.round, sent)
        received, buffers = self._here(sent)
        recipe, held = make_recipe(self.spec, self.task), self.task.data.held(0)
        gradient = probe_client(recipe, self.flat, self.number, held, received, ctx, buffers)
        return self._answer(moved(gradient, CPU), {})

    def train(self, content: RecordDict) -> RecordDict:
        """One round: what `keel.client` does for any engine, with what this site remembers of its last one."""
        last, ctx = int(str(self.asked["last"])), messages.context_of(self.asked)
        first = self.memory.received(ctx.round) if self.spec.algorithm.probes else {}
        if first is None:
            raise KeelError(f"round {ctx.round}: what was received in its first phase is not there any more")
        received, buffers = self._here({**first, **messages.received(content)})
        known = self.memory.of(last) if last else None
        memory = dict(known or {})
        buffers = memory.pop(BUFFERS, buffers)
        if not memory:
            memory = self.spec.algorithm.init_client(self._initial)
        recipe, held = make_recipe(self.spec, self.task), self.task.data.held(0)
        buffers = None if buffers is None else buffers.to(self.device)
        memory = moved(memory, self.device)
        result = train_client(recipe, self.flat, self.number, held, received, memory, ctx, buffers).to(CPU)
        sent, kept = dict(result.message), dict(result.memory)
        if result.buffers is not None:
            (kept if self.spec.model.buffers == "local" else sent)[BUFFERS] = result.buffers
        if kept:
            self.memory.keep(ctx.round, kept, last)
        lost = bool(last and kept and known is None)
        return self._answer(sent, {"steps": result.steps, "loss": float(result.loss), "lost": int(lost)})

    def evaluate(self, content: RecordDict) -> RecordDict:
        """How good the model is on this site's test examples: the loss in sum, how many are right and how many are."""
        received, buffers = self._here(messages.received(content))
        data = self.task.data
        if not has_test(data):
            return self._answer({}, {"loss": 0.0, "right": 0, "counted": 0, "examples": 0})
        evaluator = Evaluator(replace(self.task, module=self.flat.module), self.spec.model.buffers == "local")
        evaluator.look_at(received["theta"], buffers)
        measured = sum(map(evaluator.measure, range(len(evaluator.parts))), torch.zeros(evaluator.width))
        classes = data.classes
        told = {
            "loss": float(measured[0]),
            "right": int(measured[1 : 1 + classes].sum()),
            "counted": int(measured[1 + classes :].sum()),
            "examples": len(data.test),
        }
        return self._answer({}, told)

    @property
    def _initial(self) -> Tensor:
        return FlatModel(self.task.module).weights.to(CPU)

    def _here(self, sent: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """What was sent, on this site's device: the algorithm's part and the model's buffers."""
        received = moved(sent, self.device)
        return received, received.pop(BUFFERS, None)

    def _answer(self, tensors: dict[str, Tensor], told: dict[str, Any]) -> RecordDict:
        asked = ConfigRecord({"training": self.asked["training"], "round": self.asked["round"]})
        return RecordDict(
            {messages.TENSORS: messages.pack(tensors), messages.TOLD: MetricRecord(told), messages.ASKED: asked}
        )


def spec_of(text: str) -> Spec:
    """The resolved spec that the server sent."""
    return resolved_spec(tomllib.loads(text))


def initial_model(model: Model, spec: Spec) -> nn.Module:
    """The model that training starts from: the same on every machine."""
    with torch_draws(spec.seed, "model"):
        return model()


def site_number(node: Mapping[str, Any]) -> int:
    value = node.get("site")
    if type(value) is not int or value < 0:
        raise KeelError(f"node config site: {value!r}; accepted: the number of this site, as in --node-config 'site=0'")
    return value


def as_data(given: SiteData, module: nn.Module) -> FederatedData:
    """A site's examples as federated data of one client; without test examples the first of the others stands in."""
    if isinstance(given, FederatedData):
        if given.partition.clients != 1:
            raise KeelError(f"data: {given.partition.clients} clients; accepted: one, the site itself")
        return given
    if not isinstance(given, tuple) or len(given) != 2:
        raise KeelError(
            f"data: {type(given).__name__}; accepted: (inputs, labels), or that twice, the second to test on"
        )
    pair = given if isinstance(given[0], tuple) else (given, None)
    train = as_examples(pair[0], "data.")
    test = Examples(train.inputs[:1], train.targets[:1]) if pair[1] is None else as_examples(pair[1], "data.test_")
    data = FederatedData("site", train, test, Partition.of([np.arange(len(train))]), 0)
    with torch.no_grad():
        outputs = module.eval()(data.prepare(train.inputs[:1]))
    module.train()
    labels = not train.targets.is_floating_point()
    made: FederatedData = replace(data, classes=int(outputs.shape[-1]) if labels else 0)
    return made if pair[1] is not None else replace(made, name=UNTESTED)


def has_test(data: FederatedData) -> bool:
    return data.name != UNTESTED


def as_examples(arrays: Arrays, field: str) -> Examples:
    inputs, labels = (value.numpy() if isinstance(value, Tensor) else np.asarray(value) for value in arrays)
    return examples(inputs, labels, field)
