"""Keel's algorithms in another Flower app: the same training as on one machine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from keel.deploy import KeelStrategy, LocalSGD, keel_mod, messages
from keel.deploy.flower_adapter import InProcessGrid, ReplyFilter
from keel.deploy.settings import read_settings
from keel.deploy.site_data import initial_model
from tests.deploy.in_process import CONFIG, SIZES, InProcessFederation, keep_all, network, run_serial, site_examples

STEPS = 5
WORK: dict[str, Any] = {
    "local__epochs": STEPS,
    "local__batch": 100,
    "participation__rate": 1.0,
    "server__clip": False,
    "server__largest_weight": 1.0,
}
"""Full batches, so that the order of the examples does not matter; a strategy neither clips nor caps."""
app = ClientApp(mods=[keel_mod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as a Flower app does, except for the optimiser."""
    inputs, targets = site_examples(int(str(context.node_config["site"])))
    model = network()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimiser = LocalSGD(model, steps=STEPS, weight_decay=0.01)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimiser.step(closure)
    metrics = MetricRecord({"num-examples": len(targets)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def run_strategy(tmp_path: Path, name: str, reply_filter: ReplyFilter = keep_all, **settings: Any) -> torch.Tensor:
    """Return the parameters after four rounds of the strategy."""
    nodes = [{"site": site, "state-dir": str(tmp_path / f"site-{site}")} for site in range(len(SIZES))]
    spec, _ = read_settings({**CONFIG, "federation.out": "-"})
    initial = ArrayRecord(initial_model(network, spec).state_dict())
    strategy = KeelStrategy(name, lr=0.1, settings=settings, fraction_evaluate=0.0)
    result = strategy.start(InProcessGrid(app, nodes, reply_filter), initial, num_rounds=4)
    return torch.cat([value.reshape(-1) for value in result.arrays.to_torch_state_dict().values()])


def parameters(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("name", ["fedavg", "fedhbm", "scaffold", "ghbm", "feddyn", "fedacg", "fedcm", "ditto"])
def test_a_strategy_gives_the_model_of_serial(name: str, tmp_path: Path) -> None:
    settings = {"tau": 2} if name == "ghbm" else {}
    algorithm = {f"algorithm__{key}": value for key, value in settings.items()}
    serial = run_serial(tmp_path / "serial", algorithm__name=name, **algorithm, **WORK)
    torch.testing.assert_close(
        run_strategy(tmp_path, name, **settings), parameters(serial.module), atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["scaffold", "scaffold_m", "feddyn"])
def test_a_missing_reply_has_the_same_effect_as_in_a_federation(
    name: str, federation: InProcessFederation, tmp_path: Path
) -> None:
    """The share of examples by which the server weighs control variates counts only the nodes that replied."""

    def drop_second_reply_of_node_2() -> ReplyFilter:
        trained: list[int] = []

        def drop(node: int, reply: Message) -> Message | None:
            if reply.metadata.message_type == "train":
                trained.append(node)
                return None if node == 2 and trained.count(2) == 2 else reply
            return reply

        return drop

    run = federation(drop_second_reply_of_node_2(), algorithm__name=name, **WORK)
    theta = run_strategy(tmp_path / "strategy", name, drop_second_reply_of_node_2())
    torch.testing.assert_close(theta, parameters(run.module), atol=1e-6, rtol=1e-4)


def test_a_reply_with_nan_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def spoil(node: int, reply: Message) -> Message | None:
        if node == 2:
            reply.content[messages.TENSORS] = messages.pack({"delta": torch.full((39,), float("nan"))})
        return reply

    spoiled = run_strategy(tmp_path, "fedavg", spoil)
    without = run_strategy(tmp_path, "fedavg", lambda node, reply: None if node == 2 else reply)
    assert torch.equal(spoiled, without)
    assert "dropped node 2: delta or its norm is not finite" in caplog.text


@pytest.mark.parametrize("name", ["mime", "mimelitemom", "centralized"])
def test_algorithms_with_full_gradients_are_rejected(name: str) -> None:
    with pytest.raises(KeelError, match="full gradients"):
        KeelStrategy(name, lr=0.1)


def test_an_algorithm_that_sends_a_part_of_the_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"only algorithms that send the whole model \(got 'fedper'\)"):
        run_strategy(tmp_path, "fedper")


def test_an_anchor_at_the_initial_model_is_rejected() -> None:
    with pytest.raises(KeelError, match="shared_init"):
        KeelStrategy("fedhbm", lr=0.1, settings={"anchor": "shared_init"})


def test_local_sgd_requires_a_round_of_a_strategy() -> None:
    with pytest.raises(KeelError, match="keel_mod"):
        LocalSGD(nn.Linear(2, 2), steps=1)


def damage_arrays(content: RecordDict) -> None:
    content["arrays"] = ArrayRecord({"0.weight": Array("float32", (39,), "numpy.ndarray", b"damaged")})


def declare_other_shape(content: RecordDict) -> None:
    first = ArrayRecord([torch.zeros(3).numpy()])["0"]
    content["arrays"] = ArrayRecord({"0.weight": Array("float32", (39,), first.stype, first.data)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.pop("arrays"), "the request has no arrays of the model"),
        (damage_arrays, "arrays: '0.weight' cannot be read"),
        (declare_other_shape, r"arrays: '0.weight' must be float32 of shape \(39,\), as it declares"),
        (lambda content: content.pop(messages.TENSORS), "the request has no record 'keel.tensors'"),
        (lambda content: content[messages.TENSORS].pop("c"), "the request has no tensor 'c'"),
        (lambda content: content[messages.REQUEST].pop("lr"), "lr of the request must be a finite number"),
        (lambda content: content[messages.REQUEST].update(last_round="x"), "last_round of the request must be an int"),
        (lambda content: content[messages.REQUEST].update(algorithm="a ="), "algorithm of the request must be TOML"),
        (lambda content: content[messages.REQUEST].update(algorithm="a = 1"), "name of the request must be a text"),
    ],
    ids=["arrays", "bytes", "shape", "tensors", "tensor", "lr", "last_round", "TOML", "name"],
)
def test_a_malformed_request_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    strategy = KeelStrategy("scaffold", lr=0.1, min_train_nodes=1, min_available_nodes=1, min_evaluate_nodes=1)
    grid = InProcessGrid(app, [{"site": 0}])
    weights = ArrayRecord({"0.weight": Array(torch.zeros(39).numpy())})
    [request] = strategy.configure_train(1, weights, ConfigRecord(), grid)
    damage(request.content)
    context = Context(run_id=1, node_id=1, node_config={"state-dir": str(tmp_path)}, state=RecordDict(), run_config={})
    with pytest.raises(KeelError, match=message):
        keel_mod()(request, context, lambda message, context: message)
