"""The federated loop: evaluation, weights, divergence, diagnostics and observers."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from keel.algorithms import make_algorithm
from keel.algorithms.base import Algorithm, hyperparameters, weighted_mean
from keel.config.defaults import make_spec
from keel.core.client import ClientResult
from keel.core.observers import Observer, RoundEnd
from keel.core.records import Record
from keel.core.training_state import TrainingState
from keel.engines import RoundWork
from keel.engines.serial import Serial
from keel.errors import KeelError
from keel.runs.build import make_task
from tests.conftest import make_loop, records_of, small_network, uneven_data, uneven_loop


def test_the_model_is_evaluated_every_few_rounds_and_in_each_of_the_last_ones() -> None:
    records = records_of(uneven_loop({"rounds": 12, "evaluation": {"every": 4, "last": 3}}))
    assert [r["round"] for r in records if "accuracy" in r] == [4, 8, 10, 11, 12]


def test_accuracy_is_the_mean_of_the_class_accuracies_weighted_by_class_size() -> None:
    loop = uneven_loop({"rounds": 3, "evaluation": {"last": 1}})
    last = records_of(loop)[-1]
    counts = torch.bincount(loop.task.data.test.targets).tolist()
    mean = sum(a * n for a, n in zip(last["class_accuracy"], counts, strict=True)) / sum(counts)
    assert last["accuracy"] == pytest.approx(mean)


def test_a_model_that_is_not_finite_ends_the_run_as_diverged() -> None:
    loop = uneven_loop({"local": {"lr": 1e30}})
    records: list = []
    assert loop.run(loop.start(), [lambda r, *_: records.append(r)]) == "diverged"
    assert records[-1]["diverged"] is True
    assert len(records) < 25


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_weights_of_a_cohort_sum_to_one(weighting: str) -> None:
    loop = uneven_loop({"server": {"weighting": weighting}})
    cohort = loop.sampler.cohort(1)
    weights = loop.participation.weights(cohort)
    sizes = loop.task.data.partition.sizes[cohort]
    assert sum(weights) == pytest.approx(1)
    assert weights == pytest.approx((sizes / sizes.sum()).tolist() if weighting == "examples" else [1 / 3] * 3)


def test_the_training_loss_decreases() -> None:
    records = records_of(uneven_loop({"algorithm": make_algorithm("fedavg"), "rounds": 20}))
    assert records[-1]["train_loss"] < records[0]["train_loss"]


def test_an_engine_that_is_passed_connects_to_no_cluster() -> None:
    custom, engine = {"name": "custom"}, {"name": "ray", "address": "127.0.0.1:9"}
    spec = make_spec({"data": custom, "model": custom, "engine": engine})
    loop = make_loop(
        spec,
        make_task(spec, module=small_network(), data=uneven_data()),
        engine=lambda workload, workers: Serial(workload),
    )
    assert loop.engine.name == "serial"


@pytest.mark.parametrize("sampler", ["uniform", "cyclic", "weighted"])
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_every_sampler_trains_on_every_partition(sampler: str, partition: str) -> None:
    spec = make_spec(
        {
            "rounds": 2,
            "data": {"partition": partition, **({"alpha": 0.5} if partition == "dirichlet" else {})},
            "model": {"name": "linear"},
            "participation": {"sampler": sampler},
            "evaluation": {"every": 1, "last": 1},
        }
    )
    records = records_of(make_loop(spec, make_task(spec)))
    assert [len(r["cohort"]) for r in records] == [10, 10]
    assert records[-1]["test_loss"] < records[0]["test_loss"]


def test_drift_is_the_mean_distance_of_the_local_models_and_the_angle_that_of_the_momentum() -> None:
    loop = uneven_loop({"algorithm": {"name": "fedavgm"}, "rounds": 2, "evaluation": {"drift": True}})
    state, records, thetas = loop.start(), [], [loop.initial.clone()]
    reports: list[list[torch.Tensor]] = []
    train = loop.engine.train

    def recorded(work: RoundWork) -> Iterator[ClientResult]:
        reports.append([])
        for result in train(work):
            reports[-1].append(result.message["delta"])
            yield result

    loop.engine.train = recorded  # type: ignore[method-assign]
    loop.run(state, [lambda record, state, _: (records.append(record), thetas.append(state.server["theta"].clone()))])  # type: ignore[func-returns-value]
    for record, deltas, before, after in zip(records, reports, thetas, thetas[1:], strict=False):
        assert record["drift"] == pytest.approx(np.mean([np.linalg.norm(delta.numpy()) for delta in deltas]))
        assert record["momentum_angle"] == pytest.approx(0, abs=0.1)  # FedAvgM moves along its momentum
        assert not torch.equal(before, after)
    assert "drift" not in records_of(uneven_loop({"rounds": 1}))[0]


def test_deviation_compares_averaged_pseudo_gradients_with_that_of_all_clients() -> None:
    table = {"algorithm": {"name": "fedavg"}, "rounds": 3, "evaluation": {"every": 1, "deviation": [1, 2, 5]}}
    loop = uneven_loop(table)
    thetas, records = [loop.initial.clone()], []
    loop.run(
        loop.start(),
        [lambda record, state, _: (records.append(record), thetas.append(state.server["theta"].clone()))],  # type: ignore[func-returns-value]
    )
    assert [list(record["deviation"]) for record in records] == [["1"], ["1", "2"], ["1", "2"]]  # never five rounds
    full = uneven_loop({**table, "participation": {"rate": 1.0}, "rounds": 1})
    state = full.start()
    full.run(state)
    of_all = (thetas[0] - state.server["theta"]).double()  # round 1 of all clients, with the same model and minibatches
    first = (thetas[0] - thetas[1]).double()
    expected = float((first - of_all).norm() / of_all.norm())
    assert records[0]["deviation"]["1"] == pytest.approx(expected, rel=1e-4)


def test_with_full_participation_the_deviation_is_zero() -> None:
    table = {"participation": {"rate": 1.0}, "rounds": 2, "evaluation": {"every": 1, "deviation": [1]}}
    assert [r["deviation"]["1"] for r in records_of(uneven_loop(table))] == pytest.approx([0, 0], abs=1e-6)


def test_recording_the_deviation_does_not_change_the_run() -> None:
    table = {"algorithm": {"name": "fedhbm"}, "rounds": 6}
    plain = records_of(uneven_loop(table))
    measured = records_of(uneven_loop({**table, "evaluation": {"deviation": [1, 2]}}))
    assert [{k: v for k, v in record.items() if k != "deviation"} for record in measured] == plain


def test_the_deviation_requires_reports_with_a_delta() -> None:
    @hyperparameters
    class Models(Algorithm):
        """Sends models instead of differences."""

        name, title, paper = "models", "Models", "none"

        def report(self, path, received, state, ctx):  # type: ignore[no-untyped-def]
            return {"model": path.end}, state

        def aggregate(self, server, reports, ctx):  # type: ignore[no-untyped-def]
            return {"theta": weighted_mean(reports)["model"]}

    loop = uneven_loop({"algorithm": Models(), "evaluation": {"every": 1, "deviation": [1]}})
    with pytest.raises(KeelError, match="requires reports with 'delta', which Models does not send"):
        loop.run(loop.start())


def test_drift_ignores_a_momentum_of_one_element() -> None:
    @hyperparameters
    class Scalar(Algorithm):
        """Keeps a number called m."""

        name, title, paper = "scalar", "Scalar", "none"

        def init_server(self, theta):  # type: ignore[no-untyped-def]
            return {"theta": theta, "m": torch.ones(1)}

        def aggregate(self, server, reports, ctx):  # type: ignore[no-untyped-def]
            return {**super().aggregate(server, reports, ctx), "m": server["m"]}

    (record,) = records_of(uneven_loop({"algorithm": Scalar(), "rounds": 1, "evaluation": {"drift": True}}))
    assert record["drift"] > 0
    assert "momentum_angle" not in record


class Recording(Observer):
    """Records the calls of the loop."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def round_started(self, round: int) -> None:
        self.calls.append(f"started {round}")

    def message_sent(self, message: dict, clients: int) -> None:
        self.calls.append(f"sent {sorted(message)} to {clients}")

    def message_received(self, message: dict) -> None:
        self.calls.append(f"received {sorted(message)}")

    def client_reported(self, client: int, weight: float, result: ClientResult) -> None:
        self.calls.append(f"reported {client}")

    def round_ended(self, event: RoundEnd) -> dict:
        self.calls.append("ended")
        return {"answer": 42}

    def round_recorded(self, record: Record, state: TrainingState, seconds: float) -> None:
        self.calls.append(f"recorded {record['round']}")


def test_an_observer_sees_the_phases_of_a_round_and_adds_to_the_record() -> None:
    observer, records = Recording(), []
    loop = uneven_loop({"algorithm": {"name": "mime"}, "rounds": 1})
    loop.run(loop.start(), [observer, lambda record, *_: records.append(record)])
    cohort = records[0]["cohort"]
    assert observer.calls == [
        "started 1",
        "sent ['theta'] to 3",
        *["received ['gradient']"] * 3,
        "sent ['c'] to 3",
        *(call for client in cohort for call in ("received ['delta']", f"reported {client}")),
        "ended",
        "recorded 1",
    ]
    assert records[0]["answer"] == 42


def test_a_hook_that_cannot_be_called_is_refused() -> None:
    loop = uneven_loop({"rounds": 1})
    with pytest.raises(KeelError, match="hooks must hold functions"):
        loop.run(loop.start(), [3])  # type: ignore[list-item]


def test_an_observer_cannot_overwrite_the_record() -> None:
    class Overwriting(Observer):
        def round_ended(self, event: RoundEnd) -> dict:
            return {"accuracy": 2.0}

    loop = uneven_loop({"rounds": 1})
    with pytest.raises(
        KeelError, match=r"Overwriting.round_ended must not return the key 'accuracy', .*; use another name"
    ):
        loop.run(loop.start(), [Overwriting()])


@pytest.mark.parametrize("engine", ["serial", "pool"])
def test_an_observer_may_keep_the_client_states_it_sees(engine: str) -> None:
    class Keeping(Observer):
        def __init__(self) -> None:
            self.states: list[dict] = []

        def client_reported(self, client: int, weight: float, result: ClientResult) -> None:
            self.states.append(result.state)

    loop, observer = (
        uneven_loop({"algorithm": {"name": "scaffold"}, "rounds": 1, "engine": {"name": engine}}),
        Keeping(),
    )
    state = loop.start()
    loop.run(state, [observer])
    expected = [state.clients[client]["c"] for client in loop.participation.cohort(1).tolist()]
    assert all(torch.equal(kept["c"], c) for kept, c in zip(observer.states, expected, strict=True))


def test_random_draws_of_the_server_are_keyed() -> None:
    @hyperparameters
    class Noisy(Algorithm):
        """Adds noise on the server."""

        name, title, paper = "noisy", "Noisy", "none"

        def aggregate(self, server, reports, ctx):  # type: ignore[no-untyped-def]
            new = super().aggregate(server, reports, ctx)
            return {"theta": new["theta"] + 0.01 * torch.randn_like(new["theta"])}

    def model(engine: str) -> torch.Tensor:
        loop = uneven_loop({"algorithm": Noisy(), "rounds": 3, "engine": {"name": engine}})
        state = loop.start()
        loop.run(state)
        return state.server["theta"]

    assert torch.equal(model("serial"), model("pool"))


def test_a_diverged_round_has_no_angle() -> None:
    table = {"algorithm": {"name": "fedavgm"}, "local": {"lr": 1e37}, "evaluation": {"drift": True}}
    last = records_of(uneven_loop(table))[-1]
    assert last["diverged"]
    assert last.get("momentum_angle") is None
