from collections.abc import Iterator

import numpy as np
import pytest
import torch

from keel.algorithms import make_algorithm
from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.client import ClientResult
from keel.engines import FORKS, RoundWork, choose
from keel.engines.serial import Serial
from keel.errors import KeelError
from keel.models import build
from keel.params import Loss
from keel.rounds import Training
from keel.runs.spec import make_spec
from keel.task import Task, make_task, per_example_cross_entropy
from tests.conftest import records_of, small_network, uneven_data, uneven_training


def test_evaluation_is_every_so_often_and_in_each_of_the_last_rounds() -> None:
    records = records_of(uneven_training({"rounds": 12, "evaluation": {"every": 4, "last": 3}}))
    assert [r["round"] for r in records if "accuracy" in r] == [4, 8, 10, 11, 12]


def test_accuracy_is_the_mean_of_the_class_accuracies_by_their_share() -> None:
    training = uneven_training({"rounds": 3, "evaluation": {"last": 1}})
    last = records_of(training)[-1]
    counts = torch.bincount(training.task.data.test.targets).tolist()
    shares = sum(a * n for a, n in zip(last["class_accuracy"], counts, strict=True)) / sum(counts)
    assert last["accuracy"] == pytest.approx(shares)


def test_a_model_that_stops_being_finite_ends_the_run_as_diverged() -> None:
    training = uneven_training({"local": {"lr": 1e30}})
    records: list = []
    assert training.run(training.start(), [lambda r, *_: records.append(r)]) == "diverged"
    assert records[-1]["diverged"] is True
    assert len(records) < 25


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_weights_of_a_cohort_add_up_to_one(weighting: str) -> None:
    training = uneven_training({"server": {"weighting": weighting}})
    cohort = training.sampler.cohort(1)
    weights = training._weights(cohort)
    sizes = training.task.data.partition.sizes[cohort]
    assert sum(weights) == pytest.approx(1)
    assert weights == pytest.approx((sizes / sizes.sum()).tolist() if weighting == "examples" else [1 / 3] * 3)


def test_train_loss_falls() -> None:
    records = records_of(uneven_training({"algorithm": make_algorithm("fedavg"), "rounds": 40}))
    assert records[-1]["train_loss"] < records[0]["train_loss"]


def test_the_engine_is_chosen_by_the_task() -> None:
    def chosen(module: torch.nn.Module, name: str = "auto", loss: Loss = per_example_cross_entropy) -> str:
        return choose(name, Task(module, uneven_data(), loss))

    others = "pool" if FORKS else "serial"
    assert chosen(build("mlp", (64,), 10, {})) == "cohort"
    assert chosen(build("mlp", (64,), 10, {"hidden": [4000]})) == others
    assert chosen(torch.nn.Conv2d(1, 1, 1)) == others
    assert chosen(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())) == others
    assert chosen(build("mlp", (64,), 10, {}), name="serial") == "serial"
    assert chosen(build("mlp", (64,), 10, {}), loss=lambda outputs, targets: outputs[:, 0]) == others


def test_an_engine_of_ones_own_joins_no_cluster() -> None:
    custom, engine = {"name": "custom"}, {"name": "ray", "address": "127.0.0.1:9"}
    spec = make_spec({"data": custom, "model": custom, "engine": engine})
    training = Training(spec, make_task(spec, module=small_network(), data=uneven_data()), engine=Serial)
    assert training.engine.name == "serial"


@pytest.mark.parametrize("sampler", ["uniform", "cyclic", "weighted"])
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_every_sampler_trains_on_every_partition(sampler: str, partition: str) -> None:
    spec = make_spec(
        {
            "rounds": 2,
            "data": {"partition": partition, **({"alpha": 0.5} if partition == "dirichlet" else {})},
            "model": {"name": "linear"},
            "participation": {"sampler": sampler},
            "evaluation": {"last": 1},
        }
    )
    records = records_of(Training(spec, make_task(spec)))
    assert [len(r["cohort"]) for r in records] == [10, 10]
    assert 0 <= records[-1]["accuracy"] <= 1


def test_drift_is_the_mean_distance_of_the_clients_and_the_angle_that_of_momentum() -> None:
    training = uneven_training({"algorithm": {"name": "fedavgm"}, "rounds": 2, "evaluation": {"drift": True}})
    position, records, thetas = training.start(), [], [training.initial.clone()]
    reports: list[list[torch.Tensor]] = []
    train = training.engine.train

    def watched(work: RoundWork) -> Iterator[ClientResult]:
        reports.append([])
        for result in train(work):
            reports[-1].append(result.message["delta"])
            yield result

    training.engine.train = watched  # type: ignore[method-assign]
    training.run(position, [lambda r, p, _: (records.append(r), thetas.append(p.server["theta"].clone()))])  # type: ignore[func-returns-value]
    for record, deltas, before, after in zip(records, reports, thetas, thetas[1:], strict=False):
        assert record["drift"] == pytest.approx(np.mean([np.linalg.norm(delta.numpy()) for delta in deltas]))
        assert record["momentum_angle"] == pytest.approx(0, abs=0.1)  # FedAvgM moves along its momentum
        assert not torch.equal(before, after)
    assert "drift" not in records_of(uneven_training({"rounds": 1}))[0]


def test_deviation_is_that_of_averaged_pseudo_gradients_from_that_of_all_clients() -> None:
    table = {"algorithm": {"name": "fedavg"}, "rounds": 3, "evaluation": {"every": 1, "deviation": [1, 2, 5]}}
    training = uneven_training(table)
    thetas, records = [training.initial.clone()], []
    training.run(
        training.start(),
        [lambda r, p, _: (records.append(r), thetas.append(p.server["theta"].clone()))],  # type: ignore[func-returns-value]
    )
    assert [list(record["deviation"]) for record in records] == [["1"], ["1", "2"], ["1", "2"]]  # five there never are
    whole = uneven_training({**table, "participation": {"rate": 1.0}, "rounds": 1})
    start = whole.start()
    whole.run(start, [])
    of_all = (thetas[0] - start.server["theta"]).double()  # round 1 of all clients, from the same model and draws
    first = (thetas[0] - thetas[1]).double()
    expected = float((first - of_all).norm() / of_all.norm())
    assert records[0]["deviation"]["1"] == pytest.approx(expected, rel=1e-4)


def test_where_all_take_part_the_last_pseudo_gradient_does_not_deviate() -> None:
    table = {"participation": {"rate": 1.0}, "rounds": 2, "evaluation": {"every": 1, "deviation": [1]}}
    assert [r["deviation"]["1"] for r in records_of(uneven_training(table))] == pytest.approx([0, 0], abs=1e-6)


def test_what_is_recorded_of_deviation_changes_nothing_else() -> None:
    table = {"algorithm": {"name": "fedhbm"}, "rounds": 6}
    plain = records_of(uneven_training(table))
    told = records_of(uneven_training({**table, "evaluation": {"deviation": [1, 2]}}))
    assert [{k: v for k, v in record.items() if k != "deviation"} for record in told] == plain


def test_a_deviation_needs_reports_that_have_a_delta() -> None:
    @hyperparameters
    class Models(Algorithm):
        """Sends models instead of differences."""

        name, title, paper = "models", "Models", "none"

        def report(self, path, received, memory, ctx):  # type: ignore[no-untyped-def]
            return {"model": path.end}, memory

        def aggregate(self, server, reports, ctx):  # type: ignore[no-untyped-def]
            return {"theta": weighted_mean(reports)["model"]}

    training = uneven_training({"algorithm": Models(), "evaluation": {"every": 1, "deviation": [1]}})
    with pytest.raises(KeelError, match="clients of Models report no delta"):
        training.run(training.start(), [])
