"""The server of a federation: rounds as everywhere, whose clients are sites that Flower reaches.

Sampling, aggregation, evaluation, run folder, checkpoint and resume are those of every other run.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save
from torch import Tensor, nn

from keel.algorithms import messages_of
from keel.algorithms.base import Memory, Message
from keel.client import ClientResult
from keel.data.federated import Elsewhere, Examples, Partition
from keel.deploy import messages
from keel.deploy.settings import Federation, read_settings
from keel.deploy.site import Arrays, Model, as_examples, initial_model
from keel.deploy.sites import Description, Sites
from keel.engines import Absent, Problem, RoundWork
from keel.errors import KeelError
from keel.evaluation import Evaluator
from keel.memories import Form, form_of
from keel.params import FlatModel, Loss, state_fingerprint
from keel.rounds import BUFFERS, Position, Record, Training
from keel.runs.folder import RunFolder, write_whole
from keel.runs.run import Run, check_same, create, existing, go, result
from keel.runs.spec import Spec
from keel.task import Task, default_loss, make_task
from keel.units import percent, size

log = logging.getLogger("flwr")

ATTEMPTS = 5
"""How often a round with too few answers is asked for."""
MODEL = "model.safetensors"
SUMMED = {"scaffold": "c", "scaffold_m": "c", "feddyn": "h"}
"""What the server keeps of all sites' memories in sum, by algorithm: it still has the part of a memory that is lost."""
COUNTED = "keel.round"
"""All that the server keeps of a site's memory, which stays there: the round after which it was counted last."""


def server_app(model: Model, *, test: Callable[[], Arrays] | None = None, loss: Loss | None = None) -> ServerApp:
    """The Flower app of the server. With `test` it evaluates on these examples; without, the sites do on theirs."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        spec, federation = read_settings(context.run_config)
        run_federation(grid, spec, federation, model, test, loss)

    return app


def run_federation(
    grid: Grid,
    spec: Spec,
    federation: Federation,
    model: Model,
    test: Callable[[], Arrays] | None = None,
    loss: Loss | None = None,
) -> Run:
    """Trains over the sites that `grid` reaches, into federation.out; a run that is there is gone on with."""
    path = Path(federation.out)
    found = existing(spec, path)
    module, known = initial_model(model, spec), {} if found is None else found.environment
    identity = known.get("training") or uuid4().hex
    recorded: list[Description] = known.get("sites", [])
    sites = Sites(grid, federation, {"spec": spec.to_toml(), "training": identity}, recorded)
    described = recorded or sites.wait_for_all()
    tested = None if test is None else as_examples(test(), "data.test_")
    task = federation_task(spec, module, described, tested, loss)
    training = Training(spec, task, engine=lambda problem: FlowerEngine(problem, spec, sites, tested is not None))
    if found is None:
        found = create(spec, training, path, {"training": identity, "sites": described})
    with found.locked():
        check_same(found.environment, training)
        if found.ended:
            log.info("%s has ended already: %s", found.path, (found.summary or {})["status"])
            ended = result(found, training, found.saved_position() or training.start())
            if not (found.path / MODEL).exists():  # killed after the last round
                _write_model(found, ended.module)
            return ended
        position = found.restore(training.memories(found.memory_file)) or training.start(found.memory_file)
        if position.round:
            log.info("going on after round %d of %d: %s", position.round, spec.rounds, found.path)
        ended = go(found, training, position, [_progress(spec)], lambda: False)
    _write_model(found, ended.module)
    log.info("%s after %d rounds; run: %s", ended.status, ended.summary["rounds"], found.path.absolute())
    return ended


def federation_task(
    spec: Spec, module: nn.Module, described: list[Description], test: Examples | None, loss: Loss | None
) -> Task:
    """What is learned, as the server knows it from the sites' descriptions."""
    first = described[0]
    for site in described:
        for name in "shape", "target_shape", "classes", "moving":
            if site[name] != first[name]:
                raise KeelError(
                    f"site {site['site']}: {name} {site[name]}, but site {first['site']} has {first[name]}; "
                    "accepted: the same at every site"
                )
    stand_in = Examples(torch.zeros(1, *first["shape"]), torch.zeros(1, *first["target_shape"], dtype=torch.long))
    test = test or stand_in
    partition = Partition(np.zeros(1), np.cumsum([0, *(site["examples"] for site in described)]))
    data = Elsewhere("federation", stand_in, test, partition, first["classes"])
    task = make_task(spec, module=module, data=data, loss=loss)
    if unknown := set(first["moving"]) - set(dict(task.module.named_buffers())):
        raise KeelError(f"site {first['site']}: moving {sorted(unknown)}; accepted: buffers of the server's model")
    ours = state_fingerprint(task.module)
    for site in described:
        if site["model"] != ours:
            raise KeelError(
                f"site {site['site']}: its model starts as {site['model'][:12]}, the server's as {ours[:12]}; "
                "accepted: a model() that gives the same on every machine"
            )
    return replace(task, moving=tuple(first["moving"]))


class FlowerEngine:
    """Clients that are sites: asked by messages, and believed only as far as their answers hold up."""

    name = "flower"
    remote = True

    def __init__(self, problem: Problem, spec: Spec, sites: Sites, test_here: bool):
        self.spec, self.sites = spec, sites
        task = problem.task
        self.evaluator = Evaluator(task, problem.local_buffers) if test_here else OnSites(task, problem.local_buffers)
        self.positions = prod(task.data.train.targets.shape[1:])
        self.never_negative = task.loss is default_loss(task.data)
        self.averages = bool(task.moving) and not problem.local_buffers
        model = FlatModel(task.module, task.moving)
        theta = torch.zeros_like(model.weights)
        _, up = messages_of(spec.algorithm, theta)
        self.gradient_form, self.report_form = form_of(up[0]), form_of(up[-1])
        self.buffers_form: Form = {}
        if self.averages and (buffers := model.buffers()) is not None:
            self.buffers_form = form_of({BUFFERS: buffers})
        self.remembers = bool(spec.algorithm.init_client(theta)) or problem.local_buffers
        self.steps = [problem.recipe.work.count(size) for size in task.data.partition.sizes.tolist()]
        self._first: set[str] = set()
        self._round = 0

    def probe(self, work: RoundWork) -> Iterator[Message | Absent]:
        sent = self._outgoing(work)
        self._first = set(sent)

        def read(site: int, content: RecordDict) -> Message:
            messages.told(content, work.ctx.round, self._training)
            return messages.unpack(content, self.gradient_form, self.sites.federation.largest_norm)

        return iter(self._answers("train.probe", work, sent, read).values())

    def train(self, work: RoundWork) -> Iterator[ClientResult | Absent]:
        sent = {name: value for name, value in self._outgoing(work).items() if name not in self._first}
        self._first, self._round = set(), work.ctx.round
        memory: Memory = {COUNTED: torch.tensor([work.ctx.round])} if self.remembers else {}

        def read(site: int, content: RecordDict) -> ClientResult:
            told = messages.told(content, work.ctx.round, self._training)
            form = {**self.report_form, **self.buffers_form}
            tensors = messages.unpack(content, form, self.sites.federation.largest_norm)
            steps, loss = messages.count(told, "steps", 1), messages.number(told, "loss")
            if steps != self.steps[site]:
                raise messages.Broken(f"steps is {steps} instead of {self.steps[site]}")
            buffers = tensors.pop(BUFFERS, None)
            return ClientResult(tensors, memory, steps, torch.tensor(loss, dtype=torch.float64), buffers)

        def tell(site: int, content: RecordDict) -> None:
            if content.metric_records[messages.TOLD].get("lost"):
                log.warning("site %d has lost its memory, and joins as a new one", site)
                if name := SUMMED.get(self.spec.algorithm.name):
                    log.warning("the server's %s keeps what it was of site %d: it stays off by that", name, site)

        return iter(self._answers("train", work, sent, read, tell).values())

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        if not isinstance(self.evaluator, OnSites):
            self.evaluator.look_at(theta, buffers)
            yield from map(self.evaluator.measure, range(len(self.evaluator.parts)))
            return
        sent = {"theta": theta} | ({BUFFERS: buffers} if self.averages and buffers is not None else {})
        everyone = range(self.sites.federation.sites)
        answers = self.sites.ask(
            "evaluate", self._round, {site: {} for site in everyone}, dict.fromkeys(everyone, sent)
        )
        self.evaluator.sent = sum(self.traffic().values())
        for site, answer in answers.items():
            try:
                yield self._measured(answer)
            except messages.Broken as error:
                log.warning("evaluation: site %d is set aside: %s", site, error)

    def _measured(self, answer: RecordDict | Absent) -> Tensor:
        if isinstance(answer, Absent):
            raise messages.Broken(answer.reason)
        told = messages.told(answer, self._round, self._training)
        loss = messages.number(told, "loss")
        right, counted, tested = (messages.count(told, name) for name in ("right", "counted", "examples"))
        if not right <= counted <= tested * self.positions:
            raise messages.Broken(f"{right} right of {counted} in {tested} examples")
        if loss < 0 and self.never_negative:
            raise messages.Broken(f"loss is {loss:g}, which cross entropy cannot be")
        return torch.tensor([loss, right, counted, tested], dtype=torch.float64)

    def traffic(self) -> dict[str, int]:
        return self.sites.counted()

    def close(self) -> None:
        pass

    @property
    def _training(self) -> str:
        return str(self.sites.asked["training"])

    def _outgoing(self, work: RoundWork) -> Message:
        buffers = work.buffers[0] if self.averages else None
        return {**work.received, **({} if buffers is None else {BUFFERS: buffers})}

    def _answers(
        self,
        kind: str,
        work: RoundWork,
        sent: Message,
        read: Callable[[int, RecordDict], Any],
        tell: Callable[[int, RecordDict], None] = lambda site, content: None,
    ) -> dict[int, Any]:
        """What each site of the cohort answers, or why it is absent; asked again where too few answer."""
        last = {
            site: int(memory[COUNTED]) if COUNTED in memory else 0
            for site, memory in zip(work.cohort.tolist(), work.memories, strict=True)
        }
        answers: dict[int, Any] = {site: Absent("was not asked") for site in last}
        needed = min(self.sites.federation.least, len(last))
        for attempt in range(1, ATTEMPTS + 1):
            self.sites.refresh()
            left = [site for site, answer in answers.items() if isinstance(answer, Absent)]
            asked = {site: {**vars(work.ctx), "last": last[site]} for site in left}
            for site, answer in self.sites.ask(kind, work.ctx.round, asked, dict.fromkeys(left, sent)).items():
                answers[site] = self._read(site, work.ctx.round, answer, read, tell)
            there = sum(not isinstance(answer, Absent) for answer in answers.values())
            if there >= needed:
                return answers
            if attempt < ATTEMPTS:
                log.warning("round %d: %d answers, %d needed; asking again", work.ctx.round, there, needed)
                self._wait_for(list(last))
        raise KeelError(
            f"round {work.ctx.round}: {there} usable answers after asking {ATTEMPTS} times; accepted: "
            f"{needed} (federation.least). What was trained is saved: the same flwr run goes on"
        )

    def _wait_for(self, sites: list[int]) -> None:
        """Until all are connected, or nobody waits any longer."""
        until = time.monotonic() + self.sites.federation.wait / ATTEMPTS
        while time.monotonic() < until:
            self.sites.refresh()
            online = set(self.sites.grid.get_node_ids())
            if all(self.sites.nodes.get(site) in online for site in sites):
                return
            time.sleep(1.0)

    def _read(
        self,
        site: int,
        round: int,
        answer: RecordDict | Absent,
        read: Callable[[int, RecordDict], Any],
        tell: Callable[[int, RecordDict], None],
    ) -> Any:
        if not isinstance(answer, Absent):
            try:
                content = read(site, answer)
                tell(site, answer)
                return content
            except messages.Broken as error:
                answer = Absent(str(error))
        log.warning("round %d: site %d is set aside: %s", round, site, answer.reason)
        return answer


class OnSites(Evaluator):
    """Evaluates from what the sites measured on their own test examples, each by how many it has."""

    sent = 0
    """Bytes that went down to the sites for it."""

    def quality(self, measured: Iterable[Tensor]) -> dict[str, Any]:
        parts = list(measured)
        loss, right, counted, tested = sum(parts, torch.zeros(4, dtype=torch.float64)).tolist()
        if not tested:
            return {}
        accuracy = {"accuracy": right / counted} if counted else {}
        return {"test_loss": loss / tested, **accuracy, "bytes_evaluation": self.sent}


def _progress(spec: Spec) -> Callable[[Record, Position, float], None]:
    def tell(record: Record, position: Position, seconds: float) -> None:
        aside = record.get("set_aside", {})
        parts = [
            f"round {record['round']} of {spec.rounds}: {len(record['cohort'])} sites",
            f"{len(aside)} set aside" if aside else "",
            f"accuracy {percent(record['accuracy'])}" if "accuracy" in record else "",
            size(record["bytes_down"] + record["bytes_up"]),
            f"{seconds:.1f} s",
        ]
        log.info(", ".join(part for part in parts if part))

    return tell


def _write_model(folder: RunFolder, module: nn.Module) -> None:
    """The trained model, for whoever wants to use it: model.load_state_dict(safetensors.torch.load_file(...))."""
    state: Mapping[str, Tensor] = module.state_dict()
    content = save({name: value.detach().cpu().clone().contiguous() for name, value in state.items()})
    write_whole(folder.path / MODEL, [content])
