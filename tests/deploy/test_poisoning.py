"""A malicious site: what the cap on weights and the clipping of reports stop, and what they do not."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel import KeelError, Run
from keel.config.defaults import make_spec
from keel.core.client import ClientResult
from keel.core.engine import RoundWork
from keel.core.examples import Partition
from keel.core.records import Record
from keel.engines.serial import Serial
from keel.runs.build import build, make_task

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Message

from keel.deploy import messages
from keel.deploy.settings import bounds
from keel.deploy.watch import SiteLosses, idle_sites, outliers
from tests.deploy.in_process import InProcessFederation

ROUNDS = 15
Attack = Callable[[Tensor, int], Tensor]
"""A malicious site's tensor, given the honest one and the round."""


@dataclass
class Claimed:
    """A partition whose client 0 claims to have more examples than it has."""

    partition: Partition
    examples: int

    @property
    def clients(self) -> int:
        return self.partition.clients

    @property
    def sizes(self) -> np.ndarray:
        return self.sizes_of(np.arange(self.clients))

    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        return np.where(clients == 0, self.examples, self.partition.sizes_of(clients))


def honest(value: Tensor, round: int) -> Tensor:
    return value


def scaled_in(attacked: int, factor: float) -> Attack:
    return lambda value, round: factor * value if round == attacked else value


def always(factor: float) -> Attack:
    return lambda value, round: factor * value


def train(
    sites: int,
    attack: Attack,
    server: dict[str, Any],
    claim: int | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
    **data: Any,
) -> list[Record]:
    """Train on the digits, with all sites in every round. Site 0 sends what `attack` makes of its report.

    Args:
        server: The table `server` of the spec.
        claim: The number of examples that site 0 claims to have.
        data: Fields of the table `data`, such as the partition; IID by default.
    """
    spec = make_spec(
        {
            "seed": seed,
            "rounds": rounds,
            "algorithm": {"name": "fedavg"},
            "data": {"name": "digits", "clients": sites, "partition": "iid", **data},
            "local": {"epochs": 2, "batch": 32, "lr": 0.3},
            "participation": {"rate": 1.0},
            "server": server,
            "evaluation": {"every": rounds, "last": 1},
            "engine": {"name": "serial"},
        }
    )

    class Poisoned(Serial):
        def train(self, work: RoundWork) -> Iterator[ClientResult]:
            for client, result in zip(work.cohort.tolist(), super().train(work), strict=True):
                if client == 0:
                    changed = {name: attack(value, work.ctx.round) for name, value in result.message.items()}
                    result = replace(result, message=changed)
                yield result

    loop = build(spec, make_task(spec), engine=lambda workload, workers: Poisoned(workload)).loop
    if claim is not None:
        loop.participation.partition = Claimed(loop.participation.partition, claim)  # type: ignore[assignment]
    records: list[Record] = []
    loop.run(loop.start(), [SiteLosses(), lambda record, *_: records.append(record)])
    return records


def accuracy(*arguments: Any, **options: Any) -> float:
    """The accuracy after the last round; 0 if the run diverged."""
    return train(*arguments, **options)[-1].get("accuracy", 0.0)


@cache
def reference(sites: int, rounds: int = ROUNDS) -> float:
    """The accuracy of an honest federation without bounds."""
    return accuracy(sites, honest, {}, rounds=rounds)


@pytest.mark.parametrize("sites", [3, 5])
def test_the_bounds_cost_an_honest_federation_nothing(sites: int) -> None:
    bounded = train(sites, honest, bounds(sites))
    assert bounded[-1]["accuracy"] == pytest.approx(reference(sites), abs=0.01)
    assert not any("clipped" in record for record in bounded)


@pytest.mark.parametrize("attacked", [1, 8, ROUNDS])
@pytest.mark.parametrize("sites", [3, 5])
def test_a_report_times_minus_1000_in_one_round_costs_at_most_two_points(sites: int, attacked: int) -> None:
    attack = scaled_in(attacked, -1000.0)
    records = train(sites, attack, bounds(sites))
    assert records[-1]["accuracy"] >= reference(sites) - 0.02
    assert [record["round"] for record in records if "rejected" in record] == [attacked]
    assert records[attacked - 1]["rejected"] == [0]
    assert records[attacked - 1]["norms"]["0"] > 300 * records[attacked - 1]["norms"]["1"]  # type: ignore[operator]
    assert accuracy(sites, attack, {}) < records[-1]["accuracy"] - 0.01


@pytest.mark.parametrize("factor", [1000.0, -1000.0])
@pytest.mark.parametrize("sites", [3, 5])
def test_a_report_times_1000_in_every_round_costs_at_most_two_points(sites: int, factor: float) -> None:
    records = train(sites, always(factor), bounds(sites))
    assert records[-1]["accuracy"] >= reference(sites) - 0.02
    assert all(record["rejected"] == [0] for record in records)
    assert idle_sites(records, 3) == {"0": f"no valid reply in {ROUNDS} rounds: {records[-1]['dropped']['0']}"}


def test_clipping_bounds_a_site_whose_reports_are_too_long_to_be_honest_but_not_rejected() -> None:
    records = train(5, always(50.0), bounds(5))
    assert records[-1]["accuracy"] >= reference(5) - 0.05
    assert all(record["clipped"] == [0] and "rejected" not in record for record in records)


def test_a_site_of_ten_that_claims_a_million_examples_and_negates_its_report_costs_at_most_two_points() -> None:
    assert accuracy(10, always(-1.0), {}, claim=10**6, rounds=30) < 0.3
    bounded = accuracy(10, always(-1.0), bounds(10), claim=10**6, rounds=30)
    assert bounded >= reference(10, 30) - 0.02


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_an_honest_site_is_no_outlier_when_the_training_converges_nor_on_very_different_data(
    alpha: float | None,
) -> None:
    data = {} if alpha is None else {"partition": "dirichlet", "alpha": alpha}
    records = train(3, honest, bounds(3), rounds=40, **data)
    last = [record["cosines"] for record in records[-10:]]  # type: ignore[typeddict-item]
    assert min(min(cosines.values()) for cosines in last) < -0.2, "the reports point away from each other at the end"
    assert outliers(records) == {}


def test_clipping_does_not_bound_one_of_three_sites_that_always_sends_its_report_times_minus_50() -> None:
    """A third of the mean, three times as long as the others' reports, outweighs the two others. It is reported."""
    records = train(3, always(-50.0), bounds(3))
    assert records[-1]["accuracy"] < 0.5
    assert outliers(records).keys() == {"0"}
    assert outliers(records)["0"]["norm"] == outliers(records)["0"]["direction"] == [*range(1, ROUNDS + 1)]


def test_the_cap_does_not_bound_one_of_three_sites_that_claims_most_examples_and_negates_its_report() -> None:
    """Half of the mean pulls against the other half: the number of examples has to be bounded too. It is reported."""
    records = train(3, always(-1.0), bounds(3), claim=10**6)
    assert records[-1]["accuracy"] < 0.5
    assert outliers(records) == {"0": {"direction": [*range(1, ROUNDS + 1)]}}


@pytest.mark.parametrize(("factor", "claim"), [(-1.0, None), (-1.0, 10**6), (-50.0, None), (50.0, None)])
@pytest.mark.parametrize("mean", ["median", "geometric_median"])
def test_a_robust_mean_bounds_one_of_three_similar_sites_within_two_points(
    mean: str, factor: float, claim: int | None
) -> None:
    records = train(3, always(factor), {**bounds(3, mean), "mean": mean}, claim=claim, rounds=30)
    assert records[-1]["accuracy"] >= reference(3, 30) - 0.02
    assert outliers(records).keys() == {"0"}


def test_the_geometric_median_needs_equal_shares() -> None:
    """With half of the weight, the report of one site is the geometric median."""
    records = train(3, always(-1.0), {**bounds(3), "mean": "geometric_median"}, claim=10**6)
    assert records[-1]["accuracy"] < 0.5


def test_a_training_that_stops_at_a_negating_site_and_continues_without_it_recovers_within_two_points(
    tmp_path: Path,
) -> None:
    honest, attacked = stopped_and_continued(tmp_path, seed=0)
    assert attacked >= honest - 0.02


def stopped_and_continued(folder: Path, seed: int) -> tuple[float, float]:
    """Train on the digits over three sites with label skew (alpha = 1). Site 2 negates its report in every round.

    `federation.on_outlier = "stop"` ends the training, which then continues without the site.

    Returns:
        The accuracy after 30 rounds of the two other sites alone, and that of this training after 30 rounds in all.
    """
    data = {"name": "digits", "clients": 3, "partition": "dirichlet", "alpha": 1.0}
    task = make_task(make_spec({"seed": seed, "data": data, "algorithm": {"name": "fedavg"}}))
    train, test = task.data.train, task.data.test

    def examples(node: Any) -> Any:
        rows = torch.from_numpy(task.data.partition[node["site"]])
        return train.inputs[rows], train.targets[rows]

    def negate(node: int, reply: Message) -> Message:
        if node == 3 and reply.metadata.message_type == "train":
            report = messages.unpack_request(reply.content)
            reply.content[messages.TENSORS] = messages.pack({name: -tensor for name, tensor in report.items()})
        return reply

    def federate(out: str, **federation: Any) -> Run:
        local = {"local.epochs": 2, "local.batch": 32, "local.lr": 0.3, "local.weight_decay": 0.0}
        config = {"seed": seed, "rounds": 30, **local, "participation.rate": 1.0, "evaluation.every": 30}
        return InProcessFederation(folder)(
            negate,
            examples,
            lambda: deepcopy(task.module),
            lambda: (test.inputs, test.targets),
            out,
            **{**config, "evaluation.last": 1, "federation.on_outlier": "stop", **federation},
        )

    with pytest.raises(KeelError, match="site 2: its report points against those of the other sites"):
        federate("attacked")
    runs = federate("honest", **{"federation.sites": 2}), federate("attacked", **{"federation.left": "2"})
    return runs[0].records[-1]["accuracy"], runs[1].records[-1]["accuracy"]
