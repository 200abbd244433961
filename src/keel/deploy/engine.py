"""The engine of a federation: its clients are sites, which it reaches over Flower."""

from collections.abc import Callable, Iterator
from math import nan, prod
from typing import TypeVar

import torch
from flwr.app import RecordDict
from torch import Tensor

from keel.algorithms import messages_of
from keel.algorithms.base import ClientState, Message
from keel.config.schema import Spec
from keel.core.client import ClientResult
from keel.core.client_state import Signature, signature_of
from keel.core.engine import EngineDefaults
from keel.core.evaluation import Evaluator
from keel.core.flat_model import FlatModel
from keel.core.mechanisms import Sender
from keel.core.task import default_loss
from keel.core.training_state import BUFFERS
from keel.deploy import messages
from keel.deploy.evaluation import SiteEvaluator, read_measurement
from keel.deploy.flower_adapter import log
from keel.deploy.invalid_reply import InvalidReply
from keel.deploy.messages import ReplyBounds
from keel.deploy.remedies import with_remedy
from keel.deploy.sites import Sites
from keel.engines import Dropped, RoundWork, Workload
from keel.errors import KeelError

ATTEMPTS = 5
"""How often the server requests a round with too few valid replies."""
LAST_ROUND = "keel.round"
"""The only client state at the server: the last round of a site that the server counted. The rest stays at the site."""

Reply = TypeVar("Reply")


class FlowerEngine(EngineDefaults):
    """Engine that sends the work of a round to the sites and checks every reply."""

    name = "flower"
    remote = True

    def __init__(self, workload: Workload, spec: Spec, sites: Sites, evaluate_on_server: bool):
        self.spec, self.sites = spec, sites
        self.training, self.max_norm = str(sites.request["training"]), sites.federation.max_norm or None
        task, evaluator_class = workload.task, Evaluator if evaluate_on_server else SiteEvaluator
        self.evaluator = evaluator_class(task, workload.local_buffers)
        self.targets_per_example = prod(task.data.train.targets.shape[1:])
        self.non_negative_loss = task.loss is default_loss(task.data)
        self.averages_buffers = bool(task.moving) and not workload.local_buffers
        model = FlatModel(task.module, task.moving)
        theta = torch.zeros_like(model.weights)
        _, uploads = messages_of(spec.algorithm, theta, model.sizes)
        self.mechanisms, self.seed = workload.local.mechanisms, spec.seed
        encoded = self.mechanisms.encoded_form
        self.probe_signature = signature_of(encoded(uploads[0], "probe") if spec.algorithm.probes else {})
        self.report_signature = signature_of(encoded(uploads[-1]))
        self.buffer_signature: Signature = {}
        if self.averages_buffers and (buffers := model.buffers()) is not None:
            self.buffer_signature = signature_of({BUFFERS: buffers})
        self.has_client_state = bool(workload.local.init_client(theta)) or workload.local_buffers
        self.steps = [workload.local.config.count(size) for size in task.data.partition.sizes.tolist()]
        self._sent_in_probe: set[str] = set()
        self._round = 0

    @property
    def reply_bytes(self) -> int:
        """The bytes of the tensors of the largest reply."""
        signatures = self.probe_signature, {**self.report_signature, **self.buffer_signature}
        return max(ReplyBounds.of(signature).tensor_bytes for signature in signatures)

    def probe(self, work: RoundWork) -> Iterator[Message | Dropped]:
        """Run the first phase of a round at the sites, for algorithms that have one."""
        tensors = self._broadcast(work)
        self._sent_in_probe = set(tensors)

        def read(site: int, content: RecordDict) -> Message:
            messages.reply_numbers(content, work.ctx.round, self.training)
            return self._unpack(content, self.probe_signature, Sender(self.seed, work.ctx.round, site, "probe"))

        bounds = ReplyBounds.of(self.probe_signature)
        return iter(self._collect("train.probe", work, tensors, read, bounds).values())

    def train(self, work: RoundWork) -> Iterator[ClientResult | Dropped]:
        """Train at the sites. What the first phase of the round has sent is not sent again."""
        tensors = {name: value for name, value in self._broadcast(work).items() if name not in self._sent_in_probe}
        self._sent_in_probe, self._round = set(), work.ctx.round
        state: ClientState = {LAST_ROUND: torch.tensor([work.ctx.round])} if self.has_client_state else {}
        signature = {**self.report_signature, **self.buffer_signature}

        def read(site: int, content: RecordDict) -> ClientResult:
            numbers = messages.reply_numbers(content, work.ctx.round, self.training)
            tensors = self._unpack(content, signature, Sender(self.seed, work.ctx.round, site))
            steps = messages.read_integer(numbers, "steps", 1)
            loss = messages.read_loss(numbers, 1, self.non_negative_loss)
            if self.spec.privacy is not None and self.spec.privacy.hides_losses:
                loss = nan  # the site does not disclose it
            if steps != self.steps[site]:
                raise InvalidReply(f"steps is {steps}; expected {self.steps[site]}")
            if numbers.get("state_lost"):
                self._warn_of_lost_state(site)
            buffers = tensors.pop(BUFFERS, None)
            return ClientResult(tensors, state, steps, torch.tensor(loss, dtype=torch.float64), buffers)

        return iter(self._collect("train", work, tensors, read, ReplyBounds.of(signature)).values())

    def measure(self, theta: Tensor, buffers: Tensor | None) -> Iterator[Tensor]:
        """Evaluate the model: on the server's test examples if it has any, else at all sites that reply."""
        if not isinstance(self.evaluator, SiteEvaluator):
            self.evaluator.load_weights(theta, buffers)
            yield from map(self.evaluator.measure, range(self.evaluator.parts))
            return
        tensors = {"theta": theta} | ({BUFFERS: buffers} if self.averages_buffers and buffers is not None else {})
        everyone: dict[int, dict[str, int]] = {site: {} for site in self.sites.members}
        replies = self.sites.request_replies("evaluate", self._round, everyone, tensors, ReplyBounds())
        self.evaluator.bytes_sent = sum(self.traffic().values())
        measured = {
            site: self._check(f"evaluation of round {self._round}", site, reply, self._read_measurement)
            for site, reply in replies.items()
        }
        self.evaluator.missing = [
            site
            for site, measurement in measured.items()
            if isinstance(measurement, Dropped) and self.sites.test_examples(site)
        ]
        yield from (measurement for measurement in measured.values() if not isinstance(measurement, Dropped))

    def traffic(self) -> dict[str, int]:
        return self.sites.take_byte_counts()

    def close(self) -> None:
        pass

    def _unpack(self, content: RecordDict, signature: Signature, sender: Sender) -> Message:
        """Return the tensors of a reply, as they travel, after checking them and what they decode to."""
        if not self.mechanisms:
            return messages.unpack_reply(content, signature, self.max_norm)
        tensors = messages.unpack_reply(content, signature)
        encoded = {name: value for name, value in tensors.items() if name != BUFFERS}
        buffers = {name: value for name, value in tensors.items() if name == BUFFERS}
        try:
            decoded = self.mechanisms.decode(encoded, sender)
        except KeelError as error:
            raise InvalidReply(str(error)) from None
        messages.check_norms({**decoded, **buffers}, self.max_norm)
        return tensors

    def _read_measurement(self, site: int, content: RecordDict) -> Tensor:
        numbers = messages.reply_numbers(content, self._round, self.training)
        declared = self.sites.test_examples(site)
        return read_measurement(numbers, declared, self.targets_per_example, self.non_negative_loss)

    def _broadcast(self, work: RoundWork) -> Message:
        buffers = work.buffers[0] if self.averages_buffers else None
        return {**work.received, **({} if buffers is None else {BUFFERS: buffers})}

    def _collect(
        self,
        kind: str,
        work: RoundWork,
        tensors: Message,
        read: Callable[[int, RecordDict], Reply],
        bounds: ReplyBounds,
    ) -> dict[int, Reply | Dropped]:
        """Request a phase of a round from the cohort until `federation.min_replies` replies are valid.

        Returns:
            What `read` makes of each site's reply, or why the site was dropped, in the order of the cohort.
        """
        round, federation = work.ctx.round, self.sites.federation
        last_rounds = {
            site: int(state[LAST_ROUND]) if LAST_ROUND in state else 0
            for site, state in zip(work.cohort.tolist(), work.client_states, strict=True)
        }
        replies: dict[int, Reply | Dropped] = {site: Dropped("not requested") for site in last_rounds}
        required = min(federation.min_replies, len(last_rounds))
        for attempt in range(1, ATTEMPTS + 1):
            self.sites.identify_nodes()
            missing = [site for site, reply in replies.items() if isinstance(reply, Dropped)]
            requests = {site: {**messages.request_of(work.ctx), "last_round": last_rounds[site]} for site in missing}
            for site, reply in self.sites.request_replies(kind, round, requests, tensors, bounds).items():
                replies[site] = self._check(f"round {round}", site, reply, read)
            valid = sum(not isinstance(reply, Dropped) for reply in replies.values())
            if valid >= required:
                return replies
            if attempt < ATTEMPTS:
                log.warning("round %d: %d valid replies, %d required; trying again", round, valid, required)
                self.sites.wait_for(list(last_rounds), federation.wait_seconds / ATTEMPTS)
        raise KeelError(
            f"round {round}: {valid} valid replies after {ATTEMPTS} attempts, but federation.min_replies requires "
            f"{required}; earlier rounds are saved, and the same flwr run resumes"
        )

    def _check(
        self, phase: str, site: int, reply: RecordDict | Dropped, read: Callable[[int, RecordDict], Reply]
    ) -> Reply | Dropped:
        if not isinstance(reply, Dropped):
            try:
                return read(site, reply)
            except InvalidReply as error:
                reply = Dropped(str(error))
        log.warning("%s: dropped site %d: %s", phase, site, with_remedy(reply.reason))
        self.sites.record("drop", phase=phase, site=site, node=self.sites.nodes.get(site), reason=reply.reason)
        return reply

    def _warn_of_lost_state(self, site: int) -> None:
        log.warning("site %d has lost its client state and joins as a new one", site)
        if name := self.spec.algorithm.server_sum:
            log.warning("the server's %s still contains the lost state of site %d", name, site)
