"""The client app of a site: it answers the server's requests from the site's data and client state.

Flower starts a new process for each message, so a site loads only what a request needs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from keel.algorithms import messages_of
from keel.config.schema import resolved_spec
from keel.core.client import LocalTraining, probe_client, to_device, train_client
from keel.core.client_state import signature_of
from keel.core.devices import find_device
from keel.core.engine import CPU
from keel.core.evaluation import Evaluator
from keel.core.flat_model import FlatModel, Loss, state_fingerprint
from keel.core.replay import LocalGradient
from keel.core.task import Task
from keel.core.training_state import BUFFERS
from keel.deploy import messages
from keel.deploy.request_fields import origin_of, read_integer, read_table, read_text
from keel.deploy.site_answer import answer_message
from keel.deploy.site_data import Loader, Model, check_labels, has_test_examples, initial_model, site_dataset
from keel.deploy.site_errors import coded
from keel.deploy.site_noise import SiteProtection, unclippable
from keel.deploy.site_policy import APP, Policy
from keel.deploy.site_secrets import count_report, data_fingerprint
from keel.deploy.site_state import SiteState
from keel.deploy.state_folder import state_folder
from keel.deploy.versions import check_server_version, installed_versions
from keel.errors import KeelError
from keel.privacy.noise import secret_noise
from keel.privacy.plan import with_client_part
from keel.runs.build import local_training, make_task

app_parts: "WeakKeyDictionary[ClientApp, tuple[Model, Loader, Loss | None]]" = WeakKeyDictionary()
"""The model, loader and loss of each client app, for `keel deploy doctor` and `keel deploy check --simulate`."""


def client_app(model: Model, data: Loader, *, loss: Loss | None = None) -> ClientApp:
    """Make the Flower app of a site.

    Args:
        model: Returns the untrained model.
        data: Loads the site's examples; its argument is the node's configuration.
        loss: A function of outputs and targets that returns one loss per example; cross entropy by default.
    """
    app = ClientApp()
    app_parts[app] = model, data, loss

    def handler(answer: Callable[[Site, RecordDict], RecordDict]) -> Callable[[Message, Context], Message]:
        def answer_as_site(
            request: ConfigRecord, message: Message, node: Mapping[str, Any], policy: Policy | None
        ) -> RecordDict:
            return answer(Site(model, data, loss, request, node, policy), message.content)

        return partial(answer_message, answer_as_site)

    app.query()(handler(Site.describe))
    app.train("probe")(handler(Site.probe))
    app.train()(handler(Site.train))
    app.evaluate()(handler(Site.evaluate))
    return app


class Site:
    """One site, for the duration of one request."""

    def __init__(
        self,
        model: Model,
        data: Loader,
        loss: Loss | None,
        request: ConfigRecord,
        node: Mapping[str, Any],
        policy: Policy | None,
    ):
        self.request, self.node, self.policy = request, node, policy
        if "keel" in request:  # servers of earlier versions state none
            check_server_version(str(request["keel"]))
        table = read_table(request, "spec")
        if policy is not None:
            policy.check_names(table, request)
        self.spec = resolved_spec(table)
        if policy is not None:
            policy.check_settings(self.spec, request)
        self.number = site_number(node)
        if request.get("site", self.number) != self.number:
            raise KeelError(f"this is site {self.number}, but the request is for site {request['site']!r}")
        self.device = find_device(str(node.get("device", "auto")))
        torch.set_num_threads(int(node.get("threads", 1)))  # one: the number of threads changes the rounding of a sum
        self._model, self._data, self._loss = model, data, loss

    @cached_property
    def task(self) -> Task:
        with coded("model"):
            module = initial_model(self._model, self.spec)
        with coded("data"):
            data = site_dataset(self._data(self.node), module)
        with coded("model"):
            task = make_task(self.spec, module=module, data=data, loss=self._loss)
        if self.policy is not None:
            examples = int(data.partition.sizes[0])
            self.policy.check_examples(examples, local_training(self.spec, task).config.sizes(examples))
        return task

    @property
    def _clips(self) -> bool:
        return self.policy is not None and self.policy.clip_norm is not None

    @cached_property
    def local(self) -> LocalTraining:
        """The local training of the spec, with the clipping and the noise of the site's policy."""
        local, privacy = local_training(self.spec, self.task), self.spec.privacy
        if privacy is not None:
            if privacy.noise is None:
                raise KeelError("privacy.noise of the request must be set: a site does not derive it")
            local = with_client_part(local, privacy, privacy.noise, self.task, secret_noise)
        if self.policy is None or self.policy.clip_norm is None:
            return local
        protection = SiteProtection(self.policy.clip_norm, self.policy.noise)
        return replace(local, mechanisms=local.mechanisms.with_protection(protection))

    @cached_property
    def flat_model(self) -> FlatModel:
        return FlatModel(self.task.module.to(self.device), self.task.moving, self.spec.local.precision)

    @property
    def state_folder(self) -> Path:
        return state_folder(self.node, f"site-{self.number}")

    @property
    def state(self) -> SiteState:
        training, precision = read_text(self.request, "training"), self.spec.memory.precision
        with coded("state"):
            return SiteState(self.state_folder, training, precision, self.flat_model.size)

    def describe(self, content: RecordDict) -> RecordDict:
        """Describe the site's data, model and software. The fingerprint of the data has a key that stays here."""
        task = self.task
        with coded("data"):
            check_labels(task.data)
        with coded("state"):
            fingerprint = data_fingerprint(task.data, self.state_folder)
        description = ConfigRecord(
            {
                "site": self.number,
                "examples": int(task.data.partition.sizes[0]),
                "shape": list(task.data.train.inputs.shape[1:]),
                "target_shape": list(task.data.train.targets.shape[1:]),
                "classes": task.data.classes,
                "moving": list(task.moving),
                "model": state_fingerprint(task.module),
                "test_examples": len(task.data.test) if has_test_examples(task.data) else 0,
                "fingerprint": fingerprint,
                "app": str(self.node.get(APP, "")),
                **installed_versions(),
            }
        )
        return RecordDict({messages.REPLY: description})

    def probe(self, content: RecordDict) -> RecordDict:
        """Run the first phase of a round, and keep what the server sent for the second."""
        self._check_round()
        self._count_report()
        broadcast = self._tensors(content, self._downloads[0])
        ctx = messages.round_context(self.request, self.flat_model.sizes)
        with coded("state"):
            self.state.save_broadcast(ctx.round, broadcast)
        received, buffers = self._on_device(broadcast)
        local, client = self.local, self.task.data.client_examples(0)
        gradient = probe_client(local, self.flat_model, self.number, client, received, ctx, buffers)
        return self._reply(to_device(gradient, CPU), {})

    def train(self, content: RecordDict) -> RecordDict:
        """Train one round as every engine does, from the client state of the last round that the server counted."""
        self._check_round()
        self._count_report()
        last_round = read_integer(self.request, "last_round")
        ctx = messages.round_context(self.request, self.flat_model.sizes)
        with coded("state"):
            first_phase = self.state.load_broadcast(ctx.round) if self.spec.algorithm.probes else {}
            if first_phase is None:
                raise KeelError(
                    f"round {ctx.round}: the broadcast of the first phase is missing on this site; "
                    "the server drops the site in this round"
                )
            saved = self.state.load(last_round) if last_round else None
        second_phase = self._tensors(content, self._downloads[-1].keys() - first_phase.keys())
        received, buffers = self._on_device({**first_phase, **second_phase})
        state, local = dict(saved or {}), self.local
        buffers = state.pop(BUFFERS, buffers)
        if not state:
            state = local.init_client(FlatModel(self.task.module).weights.to(CPU))
        client = self.task.data.client_examples(0)
        buffers = None if buffers is None else buffers.to(self.device)
        state = to_device(state, self.device)
        gradient_of = LocalGradient(self.flat_model, local.loss)
        result = train_client(local, gradient_of, self.number, client, received, state, ctx, buffers).to(CPU)
        report, new_state = dict(result.message), dict(result.state)
        if result.buffers is not None:
            if self._clips and self.spec.model.buffers != "local":
                raise unclippable()
            (new_state if self.spec.model.buffers == "local" else report)[BUFFERS] = result.buffers
        if new_state:
            with coded("state"):
                self.state.save(ctx.round, new_state, last_round)
        state_lost = bool(last_round and new_state and saved is None)
        hidden = self.spec.privacy is not None and self.spec.privacy.hides_losses
        loss = 0.0 if hidden else float(result.loss)
        numbers = {"steps": result.steps, "loss": loss, "state_lost": int(state_lost)}
        return self._reply(report, numbers)

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Measure the model on this site's test examples: the sum of the losses, and how many targets are correct."""
        if self.policy is not None:
            self.policy.check_evaluation()
        origin_of(self.request)
        received, buffers = self._on_device(self._tensors(content, ["theta"]))
        data = self.task.data
        if not has_test_examples(data):
            return self._reply({}, {"loss": 0.0, "correct": 0, "labelled": 0, "examples": 0})
        if self.policy is not None:
            self.policy.check_test_examples(len(data.test))
            self._count_report()
        evaluator = Evaluator(replace(self.task, module=self.flat_model.module), self.spec.model.buffers == "local")
        evaluator.load_weights(received["theta"], buffers)
        sums = sum(map(evaluator.measure, range(evaluator.parts)), torch.zeros(evaluator.sums))
        numbers = {
            "loss": float(sums[0]),
            "correct": int(sums[1 : 1 + data.classes].sum()),
            "labelled": int(sums[1 + data.classes :].sum()),
            "examples": len(data.test),
        }
        return self._reply({}, numbers)

    def _on_device(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Move what the server sent to this site's device; return the algorithm's tensors and the model's buffers."""
        received = to_device(tensors, self.device)
        return received, received.pop(BUFFERS, None)

    @cached_property
    def _downloads(self) -> list[dict[str, Tensor]]:
        """What the server sends in each phase of a round, without the values."""
        return messages_of(self.spec.algorithm, torch.zeros(self.flat_model.size), self.flat_model.sizes)[0]

    def _tensors(self, content: RecordDict, required: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors of a request: the required ones, and others that the algorithm or the model has."""
        downlink = local_training(self.spec, self.task).downlink
        whole = {name: tensor for download in self._downloads for name, tensor in download.items()}
        known = dict(whole) if downlink is None else {**whole, **downlink.encoded_form(whole)}
        if (buffers := self.flat_model.buffers()) is not None:
            known[BUFFERS] = buffers
        tensors = messages.unpack_request(content, signature_of(known))
        if downlink is not None:
            tensors |= downlink.decode(tensors, whole)
        if missing := sorted(set(required) - tensors.keys()):
            raise KeelError(f"the request has no tensor {missing[0]!r}")
        return tensors

    def _check_round(self) -> None:
        origin_of(self.request)
        if self.policy is not None:
            self.policy.check_round(self.request)

    def _count_report(self) -> None:
        if self.policy is not None:
            with coded("state"):
                count_report(self.state_folder, self.policy.max_reports)

    def _reply(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> RecordDict:
        return RecordDict(
            {
                messages.TENSORS: messages.pack(tensors),
                messages.REPLY: MetricRecord(numbers),
                messages.REQUEST: origin_of(self.request),
            }
        )


def site_number(node: Mapping[str, Any]) -> int:
    """Return the site's number from the node's configuration."""
    number = node.get("site")
    if type(number) is not int or number < 0:
        raise KeelError(f"node config: site must be the number of this site, as in 'site=0' (got {number!r})")
    return number
