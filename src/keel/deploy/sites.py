"""The sites as the server reaches them: a message to each, and the answers that come in time."""

import logging
import time
from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import Any

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.error.base import FlowerError

from keel.algorithms.base import Message as Tensors
from keel.deploy import messages
from keel.deploy.settings import Federation
from keel.engines import Absent
from keel.errors import KeelError

log = logging.getLogger("flwr")  # Flower's own, which is what its users read

Description = dict[str, Any]
"""What a site tells of itself before the first round."""
POLL_SECONDS = 0.2  # at first; a twentieth of the time that was waited, up to 3 s, later
TELL_SECONDS = 30.0
LARGEST = 2**28
"""Numbers that one example may have."""
QUICKER = 10
"""Once a training goes on, new nodes have this part of federation.timeout to say who they are: everybody waits."""


class NotThisSite(messages.Broken):
    """A node that cannot be who it says it is, however often it is asked."""


class Sites:
    """Who is where. A site says its number; from the beginning of a training on it is bound to the node that said so,
    and to what it described, as `recorded`."""

    def __init__(
        self, grid: Grid, federation: Federation, asked: Mapping[str, Any], recorded: Sequence[Description] = ()
    ):
        self.grid, self.federation, self.asked = grid, federation, dict(asked)
        self.recorded = {site["site"]: site for site in recorded}
        self.nodes: dict[int, int] = {}
        self.refused: dict[int, float] = {}
        self.online: set[int] = set()
        self.described: dict[int, Description] = {}
        self.bytes = {"bytes_down": 0, "bytes_up": 0}

    def wait_for_all(self) -> list[Description]:
        """What each site tells of itself, once all are there."""
        until, told = time.monotonic() + self.federation.wait, time.monotonic()
        while len(self.described) < self.federation.sites:
            self.refresh(self.federation.timeout)
            missing = [str(n) for n in range(self.federation.sites) if n not in self.described]
            if missing and time.monotonic() > until:
                raise KeelError(
                    f"federation.sites: {self.federation.sites}, but site {', '.join(missing)} did not come; "
                    "accepted: all of them when a training begins"
                )
            if missing and time.monotonic() > told:
                log.info("waiting for site %s", ", ".join(missing))
                told = time.monotonic() + TELL_SECONDS
            time.sleep(POLL_SECONDS * bool(missing))
        self.recorded = dict(self.described)
        return [self.described[site] for site in range(self.federation.sites)]

    def refresh(self, timeout: float | None = None) -> None:
        """Asks the nodes that are new who they are; those that could not say so, again after a while."""
        if timeout is None:
            timeout = self.federation.timeout / (QUICKER if self.nodes else 1)
        before, online = self.online, set(self.grid.get_node_ids())
        self.online = online
        if before - online:  # a node that was refused may be what a site has become
            self.refused.clear()
        began = time.monotonic()
        not_yet = {node for node, until in self.refused.items() if began < until}
        new = sorted(online - set(self.nodes.values()) - not_yet)
        answers = self._exchange("query", dict.fromkeys(new, self._content({})), "0", timeout)
        pause = max(TELL_SECONDS, time.monotonic() - began)
        for node, answer in answers.items():
            try:
                self._enter(node, answer, online)
            except messages.Broken as error:
                log.warning("node %d is set aside: %s", node, error)
                self.refused[node] = inf if isinstance(error, NotThisSite) else time.monotonic() + pause

    def _enter(self, node: int, answer: RecordDict | Absent, online: set[int]) -> None:
        described = {**_described(answer), "node": node}
        site = described["site"]
        if site >= self.federation.sites:
            raise NotThisSite(f"calls itself site {site} of {self.federation.sites}")
        if self.nodes.get(site, node) in online - {node}:
            raise NotThisSite(f"calls itself site {site}, which another node is")
        for name, value in self.recorded.get(site, {}).items():
            if name == "node" and value != node and not self.federation.rebind:
                raise NotThisSite(f"calls itself site {site}, which is node {value} (a new key: federation.rebind)")
            if name != "node" and value != described[name]:
                raise messages.Broken(f"site {site}: {name} is {described[name]}, but the training began with {value}")
        log.info("site %d is node %d, with %d examples", site, node, described["examples"])
        self.nodes[site] = node
        self.described[site] = described

    def counted(self) -> dict[str, int]:
        """The bytes of the tensors in all messages since this was asked last."""
        counted, self.bytes = self.bytes, dict.fromkeys(self.bytes, 0)
        return counted

    def ask(
        self, kind: str, round: int, contents: Mapping[int, Mapping[str, Any]], tensors: Mapping[int, Tensors]
    ) -> dict[int, RecordDict | Absent]:
        """A message of this kind to each of the sites, and what came back before it was too late."""
        online = set(self.grid.get_node_ids())
        reachable = {site: self.nodes[site] for site in contents if self.nodes.get(site) in online}
        packed: dict[int, Any] = {}  # the same tensors are packed once
        for site in reachable:
            packed.setdefault(id(tensors[site]), messages.pack(tensors[site]))
        sent = {
            node: self._content({**contents[site], "round": round, "site": site}, packed[id(tensors[site])])
            for site, node in reachable.items()
        }
        answers = self._exchange(kind, sent, str(round), self.federation.timeout)
        return {
            site: answers[reachable[site]] if site in reachable else Absent("is not connected") for site in contents
        }

    def _content(self, asked: Mapping[str, Any], tensors: Any = None) -> RecordDict:
        records: dict[str, Any] = {messages.ASKED: ConfigRecord({**self.asked, **asked})}
        return RecordDict(records if tensors is None else {**records, messages.TENSORS: tensors})

    def _exchange(
        self, kind: str, contents: Mapping[int, RecordDict], group: str, timeout: float
    ) -> dict[int, RecordDict | Absent]:
        """By node."""
        if not contents:
            return {}
        sent = [Message(content, node, kind, ttl=timeout, group_id=group) for node, content in contents.items()]
        self.bytes["bytes_down"] += sum(map(messages.size_of, contents.values()))
        waiting = dict(zip(self.grid.push_messages(sent), contents, strict=True))
        answers: dict[int, RecordDict | Absent] = {}
        began = time.monotonic()
        while waiting and (waited := time.monotonic() - began) < timeout:
            for number in list(waiting):
                answer = self._pull(number)
                if answer is not None:
                    answers[waiting.pop(number)] = answer
            time.sleep(bool(waiting) * min(max(POLL_SECONDS, waited / 20), 3.0))
        self.bytes["bytes_up"] += sum(messages.size_of(a) for a in answers.values() if not isinstance(a, Absent))
        return {**answers, **{node: Absent(f"late: no answer in {timeout:g} s") for node in waiting.values()}}

    def _pull(self, number: str) -> RecordDict | Absent | None:
        """The answer to one message, if it is there; each alone, so that a broken one takes no other with it."""
        try:
            for reply in self.grid.pull_messages([number]):
                return Absent(_one_line(reply.error.reason)) if reply.has_error() else reply.content
        except (OSError, httpx.HTTPError, FlowerError):  # the connection to Flower's server, not what a site sent
            raise
        except Exception as error:  # Flower reads what a site sent, and what bad bytes lead to has no common class
            return Absent(f"broken: {type(error).__name__}: {_one_line(error)}")
        return None


def _described(answer: RecordDict | Absent) -> Description:
    if isinstance(answer, Absent):
        raise messages.Broken(answer.reason)
    told = answer.get(messages.TOLD)
    if not isinstance(told, ConfigRecord):
        raise messages.Broken("does not describe itself")
    described: Description = dict(told)
    for name, least, most in ("site", 0, 2**31), ("examples", 1, 2**40), ("classes", 0, 2**24):
        if type(described.get(name)) is not int or not least <= described[name] <= most:
            raise messages.Broken(f"{_who(described)}{name} is {described.get(name)!r}, not from {least} to {most}")
    for name, kind in ("shape", int), ("target_shape", int), ("moving", str):
        value = described.get(name)
        if not isinstance(value, list) or not all(type(part) is kind for part in value):
            raise messages.Broken(f"{_who(described)}{name} is {_one_line(value)}")
        if kind is int and (len(value) > 16 or min(value, default=1) < 1 or prod(value) > LARGEST):
            raise messages.Broken(f"{_who(described)}{name} is {_one_line(value)}, not of 1 to {LARGEST} numbers")
    if not isinstance(described.get("model"), str):
        raise messages.Broken("does not say which model it has")
    return {
        name: described[name] for name in ("site", "examples", "classes", "shape", "target_shape", "moving", "model")
    }


def _who(described: Description) -> str:
    return f"site {described['site']}: " if type(described.get("site")) is int else ""


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
