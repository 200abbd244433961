"""The sites as the server reaches them: which node is which site, requests to sites, and their replies."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from keel.algorithms.base import Message as Tensors
from keel.deploy import messages
from keel.deploy.certified_nodes import certified_name
from keel.deploy.descriptions import BOUND, Description, read_description
from keel.deploy.flower_adapter import CONNECTION_ERRORS, log
from keel.deploy.invalid_reply import InvalidReply, one_line
from keel.deploy.remedies import with_remedy
from keel.deploy.settings import Federation
from keel.deploy.versions import SOFTWARE, check_versions
from keel.engines import Dropped
from keel.errors import KeelError

POLL_SECONDS = 0.2
"""Shortest interval between two polls for replies. It grows with the time waited (a twentieth of it)."""
MAX_POLL_SECONDS = 3.0
LOG_SECONDS = 30.0
"""Interval between two log lines about missing sites."""
RETRY_SECONDS = 30.0
"""Time after which a node whose answer to the query was invalid is asked again."""
IDENTIFY_SPEEDUP = 10
"""A round waits for this fraction of the timeout for the answer of a new node, because all sites wait with it. Later
rounds accept an answer that arrives after that."""


class WrongIdentity(InvalidReply):
    """The node cannot be the site that it claims to be. It is not asked again."""


class Sites:
    """The nodes behind the sites of one run.

    A node states its site number. From the start of a run a site is bound to the node that stated it and to its
    description.

    Args:
        request: Parameters that every request carries: the spec and the ID of the run.
        recorded: The descriptions with which the sites of a resumed run joined.
        record: Called with each event for the audit log.
    """

    def __init__(
        self,
        grid: Grid,
        federation: Federation,
        request: Mapping[str, Any],
        recorded: Sequence[Description] = (),
        record: Callable[..., object] = lambda event, **fields: None,
    ):
        self.record = record
        self.members = federation.members
        """The sites that take part; others have left."""
        self.grid, self.federation, self.request = grid, federation, dict(request)
        self.recorded = {description["site"]: description for description in recorded}
        self.nodes: dict[int, int] = {}
        self.descriptions: dict[int, Description] = {}
        self._queries: dict[str, int] = {}
        """Nodes that have not answered yet, by the ID of the query."""
        self._ask_again: dict[int, float] = {}
        """When a node may be asked again; never (inf) if it claimed to be a site that it cannot be."""
        self._refusals: dict[int, set[str]] = {}
        """The reasons for which each node was rejected and that are logged."""
        self._online: set[int] = set()
        self._bytes = {"bytes_down": 0, "bytes_up": 0}

    def wait_for_new(self) -> list[Description]:
        """Return the descriptions of the sites that have not joined yet, once all of them are connected."""
        deadline, next_log = time.monotonic() + self.federation.wait_seconds, time.monotonic()
        new = [site for site in self.members if site not in self.recorded]
        while not self.descriptions.keys() >= set(new):
            self.identify_nodes(0.0)
            missing = ", ".join(str(site) for site in new if site not in self.descriptions)
            if missing and time.monotonic() > deadline:
                raise KeelError(
                    f"federation.sites is {self.federation.sites}, but site {missing} did not connect within "
                    f"{self.federation.wait_seconds:g} s{self._rejected()}; start it and run again"
                )
            if missing and time.monotonic() > next_log:
                log.info("waiting for site %s", missing)
                next_log = time.monotonic() + LOG_SECONDS
            time.sleep(bool(missing) * min(POLL_SECONDS, self.federation.wait_seconds))
        joined = {site: self.descriptions[site] for site in new}
        self.recorded |= joined
        return list(joined.values())

    def test_examples(self, site: int) -> int:
        """Return the number of test examples that a site stated when it joined."""
        description = {**self.descriptions.get(site, {}), **self.recorded.get(site, {})}
        return int(description.get("test_examples", 0))  # runs of earlier versions recorded none

    def identify_nodes(self, seconds: float | None = None) -> None:
        """Ask each new node which site it is, and read the answers that have arrived.

        A query stays open until `federation.timeout_seconds` are over; after that the node is asked again.

        Args:
            seconds: How long to wait for the answers of nodes that are asked now.
        """
        timeout = self.federation.timeout_seconds
        before, online = self._online, set(self.grid.get_node_ids())
        self._online = online
        unknown, left = online - set(self.nodes.values()), before - online
        if left:  # a rejected node may be the successor of the node that has left
            self._ask_again = {node: when for node, when in self._ask_again.items() if when < inf and node not in left}
        start = time.monotonic()
        new = sorted(node for node in unknown if self._ask_again.get(node, start) <= start)
        self._queries = {query: node for query, node in self._queries.items() if node in unknown and node not in new}
        self._queries |= self._send("query", dict.fromkeys(new, self._content({})), "0")
        self._ask_again |= dict.fromkeys(new, start + timeout)
        if seconds is None:
            seconds = timeout / IDENTIFY_SPEEDUP
        for node, reply in self._receive(self._queries, seconds if new else 0.0, messages.ReplyBounds()).items():
            try:
                self._bind(node, reply, online)
            except InvalidReply as error:
                self._report_refusal(node, str(error))
                wrong = isinstance(error, WrongIdentity)
                self._ask_again[node] = inf if wrong else time.monotonic() + RETRY_SECONDS

    def _report_refusal(self, node: int, reason: str) -> None:
        """Log and record why a node is rejected, once for each reason."""
        if reason in self._refusals.setdefault(node, set()):
            return
        self._refusals[node].add(reason)
        known = [site for site, joined in self.recorded.items() if joined.get("node") == node]
        missing = [site for site in self.members if site not in self.nodes]
        numbers = ", ".join(map(str, known or missing))
        which = f" (site {numbers})" if known else f" (missing: site {numbers})" if missing else ""
        log.warning("node %d%s rejected: %s", node, which, with_remedy(reason))
        self.record("refusal", node=node, reason=reason)

    def _rejected(self) -> str:
        """Why nodes were rejected, for the error about sites that did not join."""
        reasons = sorted(set().union(*self._refusals.values()))
        return f", or was rejected ({'; '.join(map(with_remedy, reasons))})" if reasons else ""

    def _bind(self, node: int, reply: RecordDict | Dropped, online: set[int]) -> None:
        """Bind the site that a node claims to be to that node, after checking the claim."""
        description = {**read_description(reply), "node": node}
        site = description["site"]
        if site not in self.members:
            left = site in self.federation.left_sites
            reason = "it has left (federation.left)" if left else f"federation.sites is {self.federation.sites}"
            raise WrongIdentity(f"claims to be site {site}, but {reason}")
        if self.nodes.get(site, node) in online - {node}:
            raise WrongIdentity(f"claims to be site {site}, but node {self.nodes[site]} is that site")
        certified = certified_name(node)
        if certified not in (None, f"site-{site}"):
            raise WrongIdentity(f"claims to be site {site}, but its certificate is that of {certified}")
        self._check_bounds(description)
        check_versions(site, description)
        self._check_same_app(description)
        if site in self.recorded:
            self._check_as_joined(description, self.recorded[site])
        log.info("site %d is node %d, with %d examples", site, node, description["examples"])
        self.record(
            "join",
            **{name: description[name] for name in ("site", "node", "examples", "test_examples")},
            **{name: description[name] for name in ("fingerprint", "app", *SOFTWARE)},
        )
        self.nodes[site] = node
        self.descriptions[site] = description

    def _check_bounds(self, description: Description) -> None:
        for name in "examples", "test_examples":
            if description[name] > self.federation.max_examples:
                raise InvalidReply(
                    f"site {description['site']}: {name} is {description[name]}, above federation.max_examples = "
                    f"{self.federation.max_examples}"
                )

    def _check_same_app(self, description: Description) -> None:
        """Check that all sites have approved the same code. A site without an approval states none."""
        site, app = description["site"], description["app"]
        for other, stated in self.descriptions.items():
            if other != site and app and stated["app"] not in ("", app):
                raise InvalidReply(
                    f"site {site} has approved the app {app[:12]}, site {other} has approved {stated['app'][:12]}; "
                    "approve the same app on both"
                )

    def _check_as_joined(self, description: Description, joined: Description) -> None:
        """Check that a site has the node, the data and the model with which it joined, as far as recorded."""
        site, node = description["site"], description["node"]
        if joined["node"] != node and not self.federation.allow_new_keys:
            raise WrongIdentity(
                f"claims to be site {site}, but the run started with node {joined['node']}; "
                "if the site has a new key, set federation.allow_new_keys = true"
            )
        for name in BOUND:
            if joined.get(name, description[name]) != description[name]:
                raise InvalidReply(
                    f"site {site}: {name} is {description[name]}, but the run started with {joined[name]}"
                )
        if joined.get("fingerprint", description["fingerprint"]) != description["fingerprint"]:
            if not self.federation.allow_new_data:
                raise InvalidReply(
                    f"site {site}: the data have changed since the site joined; restore them, or set "
                    "federation.allow_new_data = true"
                )
            log.warning("site %d has other data than when it joined; federation.allow_new_data accepts them", site)
            self.record("new data", site=site, node=node, before=joined["fingerprint"], now=description["fingerprint"])

    def wait_for(self, sites: Sequence[int], seconds: float) -> None:
        """Wait until these sites are connected, but no longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.identify_nodes()
            online = set(self.grid.get_node_ids())
            if all(self.nodes.get(site) in online for site in sites):
                return
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))

    def take_byte_counts(self) -> dict[str, int]:
        """Return the bytes of the tensors in all messages since the last call."""
        counts, self._bytes = self._bytes, dict.fromkeys(self._bytes, 0)
        return counts

    def request_replies(
        self,
        kind: str,
        round: int,
        requests: Mapping[int, Mapping[str, Any]],
        tensors: Tensors,
        bounds: messages.ReplyBounds,
    ) -> dict[int, RecordDict | Dropped]:
        """Send a request with the same tensors to each site, and return the replies that arrive in time.

        Args:
            kind: Flower's message type, such as "train" or "evaluate".
            requests: The parameters of the request to each site.
            bounds: The largest reply that is accepted.
        """
        online = set(self.grid.get_node_ids())
        reachable = {site: self.nodes[site] for site in requests if self.nodes.get(site) in online}
        packed = messages.pack(tensors) if reachable else None
        contents = {
            node: self._content({**requests[site], "round": round, "site": site}, packed)
            for site, node in reachable.items()
        }
        timeout, pending = self.federation.timeout_seconds, self._send(kind, contents, str(round))
        replies = self._receive(pending, timeout, bounds)
        replies |= {node: Dropped(f"late: no reply within {timeout:g} s") for node in pending.values()}
        return {site: replies[reachable[site]] if site in reachable else Dropped("not connected") for site in requests}

    def _content(self, request: Mapping[str, Any], tensors: Any = None) -> RecordDict:
        records: dict[str, Any] = {messages.REQUEST: ConfigRecord({**self.request, **request})}
        return RecordDict(records if tensors is None else {**records, messages.TENSORS: tensors})

    def _send(self, kind: str, contents: Mapping[int, RecordDict], group: str) -> dict[str, int]:
        """Send a message to each node. Return the nodes by the ID of their message."""
        if not contents:
            return {}
        ttl = self.federation.timeout_seconds
        sent = [Message(content, node, kind, ttl=ttl, group_id=group) for node, content in contents.items()]
        self._bytes["bytes_down"] += sum(map(messages.tensor_bytes, contents.values()))
        return dict(zip(self.grid.push_messages(sent), contents, strict=True))

    def _receive(
        self, pending: dict[str, int], seconds: float, bounds: messages.ReplyBounds
    ) -> dict[int, RecordDict | Dropped]:
        """Poll until all nodes have replied or `seconds` are over, at least once.

        Returns:
            The replies by node. Their messages are removed from `pending`.
        """
        replies: dict[int, RecordDict | Dropped] = {}
        start = time.monotonic()
        while pending:
            for message_id in list(pending):
                reply = self._pull_reply(message_id, bounds)
                if reply is not None:
                    replies[pending.pop(message_id)] = reply
            waited = time.monotonic() - start
            if waited >= seconds:
                break
            time.sleep(bool(pending) * min(max(POLL_SECONDS, waited / 20), MAX_POLL_SECONDS, seconds - waited))
        self._bytes["bytes_up"] += sum(
            messages.tensor_bytes(reply) for reply in replies.values() if not isinstance(reply, Dropped)
        )
        return replies

    def _pull_reply(self, message_id: str, bounds: messages.ReplyBounds) -> RecordDict | Dropped | None:
        """Return the reply to one message if it has arrived. Pulled alone, a malformed reply does not affect others.

        A reply that is too large is freed here. What exceeds every reply of the training is not even stored, see
        `reply_limit.py`.
        """
        try:
            for reply in self.grid.pull_messages([message_id]):
                if reply.has_error():
                    return Dropped(one_line(reply.error.reason))
                bounds.check(reply.content)
                return reply.content
        except InvalidReply as error:
            return Dropped(str(error))
        except CONNECTION_ERRORS:
            raise
        except Exception as error:  # Flower parses the reply here; malformed bytes raise exceptions of many classes
            return Dropped(f"malformed: {type(error).__name__}: {one_line(error)}")
        return None
