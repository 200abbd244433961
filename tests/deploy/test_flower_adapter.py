"""The private parts of Flower that `keel.deploy.flower_adapter` relies on.

After an upgrade of flwr a failure here names the part that changed; fix the adapter, no other module uses it.
"""

import ast
import inspect
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import keel

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

FLWR = f"flwr {version('flwr')}"
PUBLIC_MODULES = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
PRIVATE_NAMES = {
    "flwr.serverapp.strategy.strategy_utils:sample_nodes": "KeelStrategy samples the nodes of a round with it",
    "flwr.supercore.error.base:FlowerError": "CONNECTION_ERRORS lists it: raised when the SuperLink is lost",
    "flwr.supercore.protobuf.client:ProtobufClient": "present_certificate gives its connections a client certificate",
    "flwr.supernode.cli:flower_supernode": "run_supernode runs it",
    "flwr.supercore.run:Run": "InProcessGrid declares it as the type of Grid.run",
    "flwr.supercore.task_identity:TaskIdentity": "InProcessGrid sets it so that messages can be made in this process",
    "flwr.superlink.grid.http_grid:HttpGrid": "the real grid, whose connection errors CONNECTION_ERRORS lists",
}
app = ClientApp()


@app.query()
def answer(message: Message, context: Context) -> Message:
    if context.node_config["site"] == 1:
        raise ValueError("no data")
    return Message(RecordDict({"numbers": MetricRecord({"site": 0})}), reply_to=message)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_private_names_exist(name: str) -> None:
    module, _, attribute = name.partition(":")
    try:
        getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{FLWR} has no {name} ({error}); Keel needs it: {PRIVATE_NAMES[name]}")


def test_no_other_module_uses_private_parts_of_flower() -> None:
    offenders = []
    for source in Path(keel.__file__).parent.rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            offenders += [
                f"{source.name}: {module}"
                for module in modules
                if module.partition(".")[0] == "flwr"
                and module not in PUBLIC_MODULES
                and source.name != "flower_adapter.py"
            ]
        if "metadata.__dict__" in text and source.name != "flower_adapter.py":
            offenders.append(f"{source.name}: metadata.__dict__")
    assert offenders == []


def test_sample_nodes_takes_and_returns_what_the_strategy_expects() -> None:
    from keel.deploy.flower_adapter import InProcessGrid, sample_nodes

    assert list(inspect.signature(sample_nodes).parameters) == ["grid", "min_available_nodes", "sample_size"], (
        f"{FLWR} changed the arguments of sample_nodes; KeelStrategy.configure_train calls it"
    )
    sampled, online = sample_nodes(InProcessGrid(app, [{}, {}, {}]), 1, 2)
    assert len(set(sampled)) == 2, f"{FLWR}: sample_nodes no longer returns the sampled nodes first"
    assert sorted(online) == [1, 2, 3], f"{FLWR}: sample_nodes no longer returns the online nodes second"


def test_the_grid_has_no_abstract_method_that_the_in_process_grid_lacks() -> None:
    from keel.deploy.flower_adapter import InProcessGrid

    missing = getattr(InProcessGrid, "__abstractmethods__", frozenset())
    assert not missing, f"{FLWR} added abstract methods to Grid: {sorted(missing)}; implement them in InProcessGrid"
    assert issubclass(InProcessGrid, Grid)


def test_messages_can_be_made_sent_and_answered_in_one_process() -> None:
    from keel.deploy.flower_adapter import APP_EXCEPTION, InProcessGrid

    grid = InProcessGrid(app, [{"site": 0}, {"site": 1}])
    try:
        sent = [Message(RecordDict(), node, "query", ttl=1.0, group_id="7") for node in (1, 2)]
    except RuntimeError as error:
        pytest.fail(f"{FLWR}: Message needs more than TaskIdentity.run_id, node_id and task_id: {error}")
    ids = list(grid.push_messages(sent))
    assert [message.metadata.message_id for message in sent] == ids, (
        f"{FLWR}: metadata.__dict__['_message_id'] no longer sets message_id"
    )
    valid, failed = grid.pull_messages(ids)
    assert valid.metadata.reply_to_message_id == ids[0], f"{FLWR}: a reply no longer refers to its message's ID"
    assert (valid.metadata.src_node_id, valid.metadata.group_id) == (1, "7"), (
        f"{FLWR}: a reply no longer has its message's destination as source, and its group"
    )
    assert valid.content.metric_records["numbers"]["site"] == 0
    assert failed.has_error(), f"{FLWR}: a message made from an Error has no error"
    assert (failed.error.code, failed.error.reason) == (APP_EXCEPTION, "ValueError: no data")


def test_the_error_code_of_an_app_that_raises_is_flowers() -> None:
    from flwr.common.constant import ErrorCode

    from keel.deploy.flower_adapter import APP_EXCEPTION

    assert APP_EXCEPTION == ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{FLWR} changed its error codes"


def test_an_unreachable_superlink_raises_a_connection_error() -> None:
    """A closed port: nothing listens on port 1 of this machine."""
    from flwr.superlink.grid.http_grid import HttpGrid

    from keel.deploy.flower_adapter import CONNECTION_ERRORS

    grid = HttpGrid("127.0.0.1:1", insecure=True, token="none")
    grid._retry_invoker.max_tries = 1
    try:
        grid.get_node_ids()
    except CONNECTION_ERRORS:
        return
    except Exception as error:
        pytest.fail(f"{FLWR}: an unreachable SuperLink raises {type(error)}, which CONNECTION_ERRORS lacks")
    pytest.fail(f"{FLWR}: an unreachable SuperLink raises nothing")


def test_fedavg_has_the_attributes_that_the_strategy_reads() -> None:
    names = (
        *("fraction_train", "min_train_nodes", "min_available_nodes", "weighted_by_key"),
        *("arrayrecord_key", "configrecord_key", "train_metrics_aggr_fn"),
    )
    missing = [name for name in names if not hasattr(FedAvg(), name)]
    assert not missing, f"{FLWR}: FedAvg has no {missing}; KeelStrategy reads them"
