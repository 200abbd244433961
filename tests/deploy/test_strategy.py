"""Keel's algorithms in a Flower app of somebody else's: the same training as on one machine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from keel.deploy import KeelStrategy, LocalSGD, keel_mod, messages
from keel.deploy.check import OneProcess, Post
from keel.deploy.settings import read_settings
from keel.deploy.site import initial_model
from tests.deploy.in_one_process import CONFIG, SIZES, InOneProcess, held_by, network, serial

STEPS = 5
app = ClientApp(mods=[keel_mod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    """As a Flower app trains, but for the optimiser; all examples in each step, so that the order plays no part."""
    inputs, targets = held_by(int(str(context.node_config["site"])))
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
    told = MetricRecord({"num-examples": len(targets)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": told}), reply_to=message)


def trained(tmp_path: Path, name: str, post: Post = lambda node, reply: reply, **settings: Any) -> torch.Tensor:
    nodes = [{"site": site, "memory": str(tmp_path / f"site-{site}")} for site in range(len(SIZES))]
    spec, _ = read_settings({**CONFIG, "federation.out": "-"})
    initial = ArrayRecord(initial_model(network, spec).state_dict())
    strategy = KeelStrategy(name, lr=0.1, settings=settings, fraction_evaluate=0.0)
    result = strategy.start(OneProcess(app, nodes, post), initial, num_rounds=4)
    return torch.cat([value.reshape(-1) for value in result.arrays.to_torch_state_dict().values()])


@pytest.mark.parametrize("name", ["fedavg", "fedhbm", "scaffold", "ghbm", "feddyn", "fedacg", "fedcm"])
def test_the_model_is_that_of_one_machine(name: str, tmp_path: Path) -> None:
    work: dict[str, Any] = {"local__epochs": STEPS, "local__batch": 100, "participation__rate": 1.0}
    settings = {"tau": 2} if name == "ghbm" else {}
    work |= {f"algorithm__{key}": value for key, value in settings.items()}
    module = serial(tmp_path / "serial", algorithm__name=name, **work).module
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(trained(tmp_path, name, **settings), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["scaffold", "scaffold_m", "feddyn"])
def test_with_a_silent_node_the_model_is_that_of_a_federation_with_an_absent_site(
    name: str, federation: InOneProcess, tmp_path: Path
) -> None:
    """The server's mean of all controls grows by the share of those who answered, and by their examples."""

    def silent_in_its_second_round() -> Post:
        trained: list[int] = []

        def post(node: int, reply: Message) -> Message | None:
            if reply.metadata.message_type == "train":
                trained.append(node)
                return None if node == 2 and trained.count(2) == 2 else reply
            return reply

        return post

    work: dict[str, Any] = {"local__epochs": STEPS, "local__batch": 100, "participation__rate": 1.0}
    module = federation(silent_in_its_second_round(), algorithm__name=name, **work).module
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(
        trained(tmp_path / "own", name, silent_in_its_second_round()), expected, atol=1e-6, rtol=1e-4
    )


def test_an_anchor_that_late_nodes_do_not_have_is_refused() -> None:
    with pytest.raises(KeelError, match="shared_init"):
        KeelStrategy("fedhbm", lr=0.1, settings={"anchor": "shared_init"})


def test_a_node_that_sends_nan_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def spoil(node: int, reply: Message) -> Message | None:
        if node == 2:
            reply.content[messages.TENSORS] = messages.pack({"delta": torch.full((39,), float("nan"))})
        return reply

    hurt = trained(tmp_path, "fedavg", spoil)
    without = trained(tmp_path, "fedavg", lambda node, reply: None if node == 2 else reply)
    assert torch.equal(hurt, without)
    assert "node 2 is set aside: delta is not finite" in caplog.text


@pytest.mark.parametrize("name", ["mime", "mimelitemom", "centralized"])
def test_what_a_client_cannot_give_is_refused(name: str) -> None:
    with pytest.raises(KeelError, match="full gradients"):
        KeelStrategy(name, lr=0.1)


def test_the_optimiser_is_for_rounds_of_keels() -> None:
    with pytest.raises(KeelError, match="keel_mod"):
        LocalSGD(nn.Linear(2, 2), steps=1)
