"""Who takes part in a training: sites that join or leave while it is resumed, and more rounds for a finished one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.schema import Spec
from keel.core.examples import Partition
from keel.core.sampling import Sampler
from keel.core.training_state import TrainingState
from keel.data.statistics import client_statistics
from keel.deploy.descriptions import Description
from keel.deploy.flower_adapter import log
from keel.errors import KeelError
from keel.runs.build import Training, make_sampler
from keel.runs.environment import fingerprints
from keel.runs.folder import RunFolder
from keel.runs.run import find_run


@dataclass(frozen=True)
class Members:
    """A sampler that draws from the sites that have not left. Clients keep their numbers, and N counts all."""

    base: Sampler
    members: np.ndarray
    clients: int

    @property
    def size(self) -> int:
        return self.base.size

    @property
    def period(self) -> float:
        return self.base.period

    def cohort(self, round: int) -> np.ndarray:
        return self.members[self.base.cohort(round)]


def find_training(spec: Spec, path: Path, members: Sequence[int]) -> RunFolder | None:
    """Return the run at `path` if there is one: of this spec, or one that `extend` can change to it.

    That is a run of the same spec with fewer rounds. If rounds are added or the members change,
    `server.largest_weight`, whose default depends on the number of sites, may differ too.
    """
    if not path.exists():
        return None
    folder = RunFolder.open(path)
    before, summary = folder.spec, folder.summary
    more = before.rounds < spec.rounds and (summary is None or summary["status"] != "diverged")
    joined = before.rounds == spec.rounds and _members(folder) != list(members)
    changes = (more or joined) and _unchanging(before) == _unchanging(spec)
    return find_run(before if changes else spec, path)


def extend(folder: RunFolder, spec: Spec) -> None:
    """Change the spec of a run that `find_training` has found. A run that has ended stays unless rounds are added."""
    before = folder.spec
    if before == spec or (folder.ended and before.rounds == spec.rounds):
        return
    if before.server.largest_weight != spec.server.largest_weight:
        change = before.server.largest_weight, spec.server.largest_weight
        log.info("%s: server.largest_weight was %g and is now %g", folder.path, *change)
    if before.rounds < spec.rounds:
        if {before.local.schedule, before.server.schedule} & {"cosine", "linear"}:
            log.warning("the learning rate depends on the number of rounds: it changes after round %d", before.rounds)
        log.info("%s: %d rounds instead of %d", folder.path, spec.rounds, before.rounds)
        folder.summary_file.unlink(missing_ok=True)  # first: without it the next flwr run extends the run again
    folder.replace("spec.toml", spec.to_toml().encode())


def _unchanging(spec: Spec) -> dict[str, Any]:
    """Return what two specs of one training must have in common: all but the rounds and the largest weight."""
    identity = dict(spec.identity)
    evaluation = {name: value for name, value in identity["evaluation"].items() if name != "last"}
    server = {name: value for name, value in identity["server"].items() if name != "largest_weight"}
    return {**identity, "rounds": None, "evaluation": evaluation, "server": server}


def check_left(left: frozenset[int], recorded: Sequence[Description]) -> None:
    """Raise a KeelError if a site has left that never joined: sites are numbered without gaps."""
    if unknown := sorted(left - {description["site"] for description in recorded}):
        raise KeelError(f"federation.left names site {unknown[0]}, which never joined this run; remove it")


def member_sampler(spec: Spec, descriptions: Sequence[Description], members: Sequence[int]) -> Sampler | None:
    """Return a sampler of the sites that have not left; None if no site has left."""
    if len(members) == len(descriptions):
        return None
    if not members:
        raise KeelError("federation.left leaves no site to train with; remove a site from it")
    sizes = [descriptions[site]["examples"] for site in members]
    base = make_sampler(spec, Partition(np.zeros(1), np.cumsum([0, *sizes])))
    return Members(base, np.array(members), len(descriptions))


def record_membership(
    folder: RunFolder, training: Training, descriptions: list[Description], members: Sequence[int]
) -> None:
    """Record the sites and members of a resumed run if they have changed since it was last started."""
    environment: dict[str, Any] = {**folder.environment}
    if not membership_changes(folder, descriptions, members):
        return
    now = fingerprints(training.loop)
    changed = {name: now[name] for name in ("partition_sha256", "cohorts_sha256")}
    environment |= {"sites": descriptions, "members": list(members), **changed}
    statistics = {**(folder.client_statistics or {}), **client_statistics(training.loop.task.data)}
    folder.replace("data.json", json.dumps(statistics).encode())
    folder.replace("environment.json", json.dumps(environment, indent=2).encode())
    log.info("members are now site %s", ", ".join(map(str, members)))


def membership_changes(folder: RunFolder, descriptions: list[Description], members: Sequence[int]) -> bool:
    """Return whether sites have joined, left or changed since the run was last started."""
    return folder.environment["sites"] != descriptions or _members(folder) != list(members)


def _members(folder: RunFolder) -> list[int]:
    environment: dict[str, Any] = {**folder.environment}
    return list(environment.get("members", [site["site"] for site in environment["sites"]]))


def rescale_server_sum(training: Training, state: TrainingState, descriptions: Sequence[Description]) -> None:
    """Rescale the server's mean over all client states to the sites that have joined since the last checkpoint.

    A new site's state is zero, so that the mean over more sites is smaller. The checkpoint keeps the mean before that,
    so that a server that is killed before the next round repeats this.
    """
    name = training.spec.algorithm.server_sum
    if name is None or not state.round:
        return
    uniform = training.spec.server.weighting == "uniform"
    shares = {site["site"]: 1 if uniform else site["examples"] for site in descriptions}
    new = sum(shares[site["site"]] for site in descriptions if site.get("joined", 0) == state.round)
    if new:
        total = sum(shares.values())
        state.server = {**state.server, name: state.server[name] * ((total - new) / total)}
