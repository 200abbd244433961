"""Compressed runs: every algorithm, the counted bytes, error feedback, engines and resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

from keel.algorithms import REGISTRY
from keel.compression.codecs import RandomK, Sign, TopK
from keel.compression.mechanism import Compression
from keel.config.defaults import make_spec
from keel.core.loop import Loop
from keel.core.mechanisms import Sender
from keel.core.observers import Observer, size_in_bytes
from keel.core.records import Record
from keel.core.training_state import TrainingState
from keel.errors import KeelError
from keel.runs.build import build, make_task
from keel.runs.checkpoint import load_checkpoint, save_checkpoint
from keel.testing.tasks import small_network, uneven_data
from tests.conftest import uneven_loop

CODECS = ("top_k", "random_k", "int8", "int4", "sign")


def ended(loop: Loop, state: TrainingState | None = None) -> tuple[TrainingState, list[Record]]:
    records: list[Record] = []
    state = state or loop.start()
    loop.run(state, [lambda record, *_: records.append(record)])
    return state, records


@pytest.mark.parametrize("algorithm", REGISTRY)
def test_every_algorithm_runs_with_every_codec_or_is_refused(algorithm: str) -> None:
    table = {"algorithm": {"name": algorithm}, "rounds": 2}
    if algorithm == "centralized":
        with pytest.raises(KeelError, match="compression must be left out for centralized, which sends nothing"):
            uneven_loop({**table, "compression": {"up": "int8"}})
        return
    whole = ended(uneven_loop(table))[1]
    for codec in CODECS:
        state, records = ended(uneven_loop({**table, "compression": {"up": codec, "down": "int4"}}))
        assert torch.isfinite(state.server["theta"]).all()
        for key in ("bytes_up", "bytes_down"):
            assert 0 < sum(record[key] for record in records) < sum(record[key] for record in whole)  # type: ignore[literal-required]


@pytest.mark.parametrize("codec", CODECS)
def test_the_encoded_message_is_counted_and_the_decoded_one_is_read(codec: str) -> None:
    class Watch(Observer):
        def __init__(self) -> None:
            self.down, self.up, self.read = list[Any](), list[Any](), list[Any]()

        def message_sent(self, message: Any, clients: int) -> None:
            self.down.append(message)

        def message_received(self, message: Any) -> None:
            self.up.append(message)

        def client_reported(self, client: int, weight: float, result: Any) -> None:
            self.read.append(result.message)

    watch = Watch()
    loop = uneven_loop({"algorithm": {"name": "fedavg"}, "rounds": 1, "compression": {"up": codec, "down": "int8"}})
    records: list[Record] = []
    loop.run(loop.start(), [watch, lambda record, *_: records.append(record)])
    assert records[0]["bytes_down"] == 3 * size_in_bytes(watch.down[0]) == 3 * (39 + 4)
    assert records[0]["bytes_up"] == sum(map(size_in_bytes, watch.up))
    assert all(name.startswith("delta.") for name in watch.up[0])
    assert [list(message) for message in watch.read] == [["delta"]] * 3
    assert watch.read[0]["delta"].shape == (39,)


@pytest.mark.parametrize("codec", [TopK(0.1), RandomK(0.1, False), Sign()])
def test_with_error_feedback_nothing_is_lost_only_delayed(codec: Any) -> None:
    """For each tensor of a stateful algorithm's report, over the rounds in which the client takes part."""
    example = {"delta": torch.zeros(50), "control": torch.zeros(50), "count": torch.zeros(1)}
    mechanism = Compression(codec, codec, {"report": example, "probe": {}}, feedback=True)
    state, reported, decoded = mechanism.init_client(), torch.zeros(2, 50), torch.zeros(2, 50)
    for round in (1, 4, 5, 9):
        large = torch.randn(2, 50, generator=torch.Generator().manual_seed(round))
        sender = Sender(0, round, 3)
        message, state = mechanism.encode(
            {"delta": large[0], "control": large[1], "count": torch.ones(1)}, state, sender
        )
        received = mechanism.decode(message, sender)
        reported, decoded = reported + large, decoded + torch.stack([received["delta"], received["control"]])
        assert received["count"] == 1
    torch.testing.assert_close(decoded + torch.stack([state["delta"], state["control"]]), reported)
    assert not torch.allclose(decoded, reported)


def test_a_client_keeps_its_residual_until_it_answers_again() -> None:
    loop, residuals, waited = loop_of("serial", "scaffold", {"up": "top_k"}), dict[int, Any](), 0
    name = "keel.mechanism.compression.delta"

    def check(record: Record, state: TrainingState, seconds: float) -> None:
        nonlocal waited
        for client, kept in state.clients.items():
            now, before = kept[name].clone(), residuals.get(client)
            if before is not None:
                assert torch.equal(now, before) == (client not in record["cohort"])
                waited += client not in record["cohort"]
            residuals[client] = now

    loop.run(loop.start(), [check])
    assert waited


def test_only_with_error_feedback_a_client_keeps_a_residual() -> None:
    for feedback in (True, False):
        compression = {"up": "sign", "error_feedback": feedback}
        state, _ = ended(uneven_loop({"algorithm": {"name": "fedavg"}, "rounds": 1, "compression": compression}))
        assert bool(state.clients) == feedback
    assert list(state.server) == ["theta"]


def loop_of(engine: str, algorithm: str, compression: dict[str, Any]) -> Loop:
    table = {"data": {"name": "custom"}, "model": {"name": "custom"}, "engine": {"name": engine, "workers": 2}}
    more = {"local": {"epochs": 1, "batch": 4}, "rounds": 4, "participation": {"rate": 1.0}}
    availability = {"dropout": 0.2}
    fields = {"algorithm": {"name": algorithm}, "compression": compression, "availability": availability}
    spec = make_spec({**table, **more, **fields})
    return build(spec, make_task(spec, module=small_network(), data=uneven_data())).loop


@pytest.mark.parametrize(("algorithm", "codec"), [("scaffold", "top_k"), ("mime", "random_k"), ("fedhbm", "int4")])
def test_pool_has_the_bits_of_serial_and_cohort_the_same_messages(algorithm: str, codec: str) -> None:
    compression = {"up": codec, "down": "int8"}
    (serial, records), (pool, in_pool) = (
        ended(loop_of(engine, algorithm, compression)) for engine in ("serial", "pool")
    )
    assert records == in_pool
    assert torch.equal(serial.server["theta"], pool.server["theta"])
    cohort, batched = ended(loop_of("cohort", algorithm, compression))
    assert [record["bytes_up"] for record in batched] == [record["bytes_up"] for record in records]
    # a rounding difference can move an element to the next level, so that the models agree to a few levels
    assert torch.linalg.vector_norm(cohort.server["theta"] - serial.server["theta"]) < 0.5


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    compression = {"up": "sign", "down": "int4"}
    whole, _ = ended(loop_of("serial", "ghbm", compression))
    loop = loop_of("serial", "ghbm", compression)
    state = loop.start(tmp_path / "clients.bin")
    loop.run(state, stop=lambda: state.round == 2)
    save_checkpoint(tmp_path / "state.safetensors", state)
    later = loop_of("serial", "ghbm", compression)
    resumed = load_checkpoint(tmp_path / "state.safetensors", later.client_states(tmp_path / "clients.bin"))
    assert resumed is not None
    assert resumed.round == 2
    later.run(resumed)
    assert torch.equal(resumed.server["theta"], whole.server["theta"])
    for client, kept in whole.clients.items():
        assert all(torch.equal(resumed.clients[client][name], value) for name, value in kept.items())


def test_without_the_table_nothing_is_encoded() -> None:
    loop = uneven_loop({})
    assert not loop.local.mechanisms
    assert loop.local.downlink is None
    assert "compression" not in make_spec({}).to_toml()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"down": "top_k"}, "down must be 'int8' or 'int4' (got 'top_k'): a broadcast is a whole model"),
        ({"up": "int8", "fraction": 0.1}, "fraction requires up = 'top_k' or 'random_k' (got up = 'int8')"),
        ({"down": "int8", "error_feedback": True}, "error_feedback requires up, the codec of reports"),
        ({"error_feedback": None, "fraction": 0.1}, "up or down must be set"),
        ({"up": "topk"}, "compression.up must be"),
        ({"up": "top_k", "fraction": 0.0}, "compression.fraction must be"),
    ],
)
def test_a_table_that_cannot_be_run_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError) as error:
        make_spec({"compression": table})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
