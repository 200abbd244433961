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
    "flwr.supercore.logger:update_console_handler": "the server's log gets timestamps with it",
    "flwr.serverapp.strategy.strategy_utils:sample_nodes": "KeelStrategy samples the nodes of a round with it",
    "flwr.supercore.error.base:FlowerError": "CONNECTION_ERRORS lists it: raised when the SuperLink is lost",
    "flwr.supercore.protobuf.client:ProtobufClient": "present_certificate gives its connections a client certificate",
    "flwr.supernode.cli:flower_supernode": "run_supernode runs it",
    "flwr.supercore.run:Run": "InProcessGrid declares it as the type of Grid.run",
    "flwr.supercore.task_identity:TaskIdentity": "InProcessGrid sets it so that messages can be made in this process",
    "flwr.supernode.start_client_internal:_pull_and_store_message": "run_supernode checks app bundles in it",
    "flwr.supernode.start_client_internal:_insert_message": "run_supernode replies to a refused message with it",
    "flwr.supernode.cli.flower_supernode:_parse_args_run_supernode": "node_config_of reads the node's options with it",
    "flwr.superlink.cli:flower_superlink": "run_superlink runs it",
    "flwr.superlink.servicer.fleet.fleet_handlers:pull_messages": "run_superlink counts delivered messages in it",
    "flwr.superlink.servicer.fleet.fleet_handlers:push_messages": "run_superlink refuses large replies in it",
    "flwr.superlink.servicer.fleet.fleet_handlers:push_object": "run_superlink refuses large replies in it",
    "flwr.superlink.routers.fleet.node_auth:authenticate_node": "run_superlink checks a node's certificate in it",
    "flwr.proto.message_pb2:PushObjectResponse": "run_superlink answers a refused push with it",
    "flwr.common.config:parse_config_args": "node_config_of and keel deploy doctor read a node's configuration with it",
    "flwr.common.config:get_project_dir": "run_supernode removes an installed app with it",
    "flwr.cli.config_utils:get_fab_metadata": "run_supernode compares a run's name with that of its bundle",
    "flwr.cli.build:build_fab_from_disk": "keel deploy approve builds the bundle of a folder with it",
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


def test_a_node_pulls_messages_by_the_parts_that_the_check_replaces() -> None:
    from flwr.common.constant import ErrorCode
    from flwr.supercore.constant import TaskType
    from flwr.supernode import start_client_internal

    from keel.deploy.flower_adapter import AGENT_APP, INVALID_BUNDLE

    names = list(inspect.signature(start_client_internal._pull_and_store_message).parameters)
    used = {"state", "object_store", "node_config", "receive", "get_run", "get_fab"}
    assert used <= set(names), f"{FLWR} changed the arguments of _pull_and_store_message: {names}"
    body = inspect.getsource(start_client_internal._pull_and_store_message)
    for call in "receive()", "get_run(run_id)", "get_fab(run_info.fab_hash, run_id)", "node_config=node_config":
        assert call in body, f"{FLWR}: _pull_and_store_message has no {call}; review _pull_checked"
    loop = inspect.getsource(start_client_internal.start_client_internal)
    assert "_pull_and_store_message(\n                state=state," in loop, f"{FLWR}: it is no longer called by name"
    assert INVALID_BUNDLE == ErrorCode.INVALID_FAB, f"{FLWR} changed its error codes"
    assert AGENT_APP == TaskType.AGENT_APP, f"{FLWR} changed its task types"
