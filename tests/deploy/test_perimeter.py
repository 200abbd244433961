"""Attacks on a server behind its proxy: with the public `ca.crt` alone, and with the credentials of a site.

One SuperLink, one nginx and one SuperNode, started by the template's scripts on free ports of 127.0.0.1.
"""

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode import node_auth_http_interceptor

from keel.deploy.approval import Approval
from keel.deploy.authority import Authority
from keel.deploy.credentials import make_certificates, make_node_key
from keel.deploy.doctor import connection_findings
from keel.deploy.flower_adapter import build_bundle
from keel.deploy.new import new_federation
from tests.deploy.fleet import fleet_client, node_key, site_credentials
from tests.deploy.processes import NGINX, Federation

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt install nginx-light)")

HEADERS = {"content-type": "application/protobuf", "accept": "application/protobuf"}
FLEET = "/v1/fleet/pull-messages"
ATTACKER = """import json
import os
import sys
from pathlib import Path

from flwr.cli.app import app
from flwr.supercore.cli import flower_superexec
from keel.deploy.flower_adapter import present_certificate

children = {}
for credentials in sys.argv[2:]:
    for words in json.loads(sys.argv[1]):
        child = os.fork()  # Flower is imported once
        if child == 0:
            os.dup2(2, 1)
            if credentials:
                present_certificate(Path(credentials + ".crt"), Path(credentials + ".key"))
            sys.argv = words
            app() if words[0] == "flwr" else flower_superexec()
            sys.exit(0)
        if words[0] == "flwr":  # a superexec tries again and again
            children[child] = words
codes = []
while children:
    child, status = os.wait()
    if children.pop(child, None):
        codes.append(os.waitstatus_to_exitcode(status))
print(json.dumps(codes))
"""
"""Runs each command with each of the credentials, where "" is none, and prints the exit codes of flwr."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("perimeter") / "two-sites"
    new_federation(folder, 2, "fedavg")
    federation = Federation(folder, 2)
    connection = folder / ".flwr" / "config.toml"
    connection.write_text(connection.read_text().replace("8000", str(federation.port)))
    make_certificates(folder / "certificates", ["keel.example.org"])
    Approval(folder / "approved").approve(build_bundle(folder))
    try:
        federation.start_server()
        federation.start_proxy()
        federation.add_site(0)
        federation.add_site(1)
        yield federation
    finally:
        federation.close()


@pytest.fixture(scope="module")
def stolen(federation: Federation) -> Path:
    """The credentials of site 1 in a folder of their own, as `site-1.crt` and `site-1.key`."""
    return site_credentials(federation, 1, federation.folder.parent / "stolen")


@pytest.fixture(scope="module")
def own(federation: Federation) -> Path:
    """The credentials of site 0."""
    return site_credentials(federation, 0, federation.folder.parent / "own")


def post(
    federation: Federation,
    path: str,
    credentials: Path | None,
    content: bytes = b"",
    port: int = 0,
    headers: dict[str, str] = HEADERS,
) -> int:
    """Return the status of a request to the proxy. A handshake that the proxy ends is an httpx.HTTPError."""
    context = ssl.create_default_context(cafile=str(federation.folder / "certificates" / "ca.crt"))
    if credentials is not None:
        context.load_cert_chain(f"{credentials}.crt", f"{credentials}.key")
    url = f"https://127.0.0.1:{port or federation.proxy_port}{path}"
    return httpx.post(url, content=content, headers=headers, verify=context, trust_env=False, timeout=30).status_code


def tls_status(federation: Federation, credentials: Path | None) -> str:
    """Return what the doctor says about a site's certificate."""
    identity = None if credentials is None else (Path(f"{credentials}.crt"), Path(f"{credentials}.key"))
    ca = federation.folder / "certificates" / "ca.crt"
    findings = connection_findings(f"127.0.0.1:{federation.proxy_port}", ca, identity)
    return next(finding.status for finding in findings if finding.check == "tls")


def test_the_server_listens_on_the_loopback_interface_only(federation: Federation) -> None:
    listening = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line}
    assert f"0100007F:{federation.port:04X}" in listening
    assert f"00000000:{federation.port:04X}" not in listening


def test_a_node_joins_through_the_proxy_and_the_log_names_its_certificate(federation: Federation) -> None:
    federation.start_node(0, 'synthetic=true state-dir="another/folder"')
    federation.wait_until(lambda: "site-0 SUCCESS" in access_log(federation, "pull-messages"), "site 0 asks for work")
    assert re.search(r'site-0 SUCCESS "POST /v1/fleet/pull-messages HTTP/1.1" 200', access_log(federation, ""))
    assert "online" in federation.flwr("supernode", "list", "federation")


def test_flwr_and_superexec_are_refused_from_outside(federation: Federation, stolen: Path) -> None:
    """With ca.crt alone the proxy asks for a certificate (400); with a site's certificate it forbids the path (403)."""
    key = make_node_key(federation.folder.parent / "attacker")
    config = federation.folder.parent / "attack" / "config.toml"
    config.parent.mkdir()
    address = (federation.folder / ".flwr" / "config.toml").read_text()
    config.write_text(address.replace(f":{federation.port}", f":{federation.proxy_port}"))
    environment = {**federation.environment, "FLWR_HOME": str(config.parent)}
    proxy, ca = f"127.0.0.1:{federation.proxy_port}", federation.folder / "certificates" / "ca.crt"
    attacks = {
        "start-run": ("flwr", "run", ".", "federation"),
        "register-node": ("flwr", "supernode", "register", str(key), "federation"),
        "unregister-node": ("flwr", "supernode", "unregister", "1", "federation"),
        "list-nodes": ("flwr", "supernode", "list", "federation"),
        "acquire-task": ("flower-superexec", "--runtime-api-address", proxy, "--root-certificates", str(ca)),
    }
    before = len(access_log(federation, ""))
    attacker = subprocess.Popen(
        [sys.executable, "-c", ATTACKER, json.dumps([*attacks.values()]), str(stolen), ""],
        cwd=federation.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def refused() -> bool:
        log = access_log(federation, "")[before:]
        requests = [rf'"POST /v1/\w+/{path} HTTP/1.1" {status} ' for path in attacks for status in (403, 400)]
        return all(re.search(request, log) for request in requests)

    try:
        federation.wait_until(refused, "all attacks are refused")
        assert attacker.stdout is not None
        codes = json.loads(attacker.stdout.readline())
    finally:
        os.killpg(attacker.pid, signal.SIGKILL)
        attacker.communicate()
    assert len(codes) == 2 * (len(attacks) - 1)
    assert all(codes), codes
    nodes = json.loads(federation.flwr("supernode", "list", "federation", "--format", "json"))["nodes"]
    assert {int(node["node-id"]) for node in nodes} == {*federation.nodes.values()}


def test_a_foreign_superexec_on_the_server_itself_is_refused(federation: Federation) -> None:
    assert post(federation, "/v1/runtime/acquire-task", None, port=federation.port) == 401


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/openapi.json",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/unregister-node",
        "/v1/fleet/../control/list-nodes",
        "/v1/fleet/..%2fcontrol/list-nodes",
        "/v1/fleet/pull-messages/../../control/list-nodes",
        "//v1/control/list-nodes",
    ],
)
def test_a_site_reaches_no_path_but_those_of_a_node(federation: Federation, stolen: Path, path: str) -> None:
    assert post(federation, path, stolen) == 403


def test_the_fleet_path_needs_a_certificate_of_the_authority_for_clients(
    federation: Federation, stolen: Path, tmp_path: Path
) -> None:
    folder = federation.folder / "certificates"
    assert post(federation, FLEET, stolen) == 401  # it passes the proxy, and Flower asks for the node's signature
    assert post(federation, FLEET, None) == 400
    make_certificates(tmp_path / "other", ["127.0.0.1"])
    request = make_node_key(tmp_path / "keys" / "site-1").with_suffix(".csr")
    Authority.load(tmp_path / "other").certify_site(1, request)
    shutil.copy(tmp_path / "keys" / "site-1.key", tmp_path / "other")
    for credentials in tmp_path / "other" / "site-1", folder / "server":
        assert post(federation, FLEET, credentials) == 400


def test_a_request_above_the_limit_is_refused(federation: Federation, stolen: Path) -> None:
    assert post(federation, "/v1/fleet/push-object", stolen, b"0" * (5 << 20)) == 401
    assert post(federation, "/v1/fleet/push-object", stolen, b"0" * (17 << 20)) == 413


def test_the_server_refuses_a_reply_above_its_limit_and_another_certificate(
    federation: Federation, stolen: Path, own: Path
) -> None:
    """The node of site 0 pushes more than the server app of its run has announced; then it has site 1's certificate."""
    limits = federation.folder / ".server-state"
    limits.mkdir(exist_ok=True)
    (limits / "replies-5").write_text("1000")
    node = federation.nodes[0]
    key = node_key(federation, 0)
    push = PushObjectRequest(node=Node(node_id=node), run_id=5, object_id="0", object_content=bytes(2000))

    def stored(certificate: Path) -> bool:
        client = fleet_client(federation, certificate, key)
        try:
            return bool(client.PushObject(push).stored)
        finally:
            client.close()

    assert not stored(own)
    assert f"refused 2000 bytes of node {node}: more than a reply of run 5 can have" in federation.log("server")
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        stored(stolen)
    assert f"refused a request of node {node}: it came with the certificate of site-1" in federation.log("server")


def test_a_site_acts_neither_as_another_node_nor_with_a_new_key(federation: Federation, stolen: Path) -> None:
    other, own = Node(node_id=federation.nodes[0]), Node(node_id=federation.nodes[1])
    site_1, new = node_key(federation, 1), ec.generate_private_key(ec.SECP384R1())

    def status(key: ec.EllipticCurvePrivateKey, call: str, request: Any) -> int:
        client = fleet_client(federation, stolen, key)
        try:
            getattr(client, call)(request)
        except httpx.HTTPStatusError as error:
            return error.response.status_code
        finally:
            client.close()
        return 200

    calls = {
        "PullMessages": PullMessagesRequest,
        "PushMessages": PushMessagesRequest,
        "PushObject": PushObjectRequest,
        "PullObject": PullObjectRequest,
        "GetFab": GetFabRequest,
        "SendNodeHeartbeat": SendNodeHeartbeatRequest,
    }
    assert {call: status(site_1, call, request(node=other)) for call, request in calls.items()} == dict.fromkeys(
        calls, 401
    )
    assert status(site_1, "PullMessages", PullMessagesRequest(node=own)) == 200
    for sender in other, own:
        metadata = Metadata(src_node_id=sender.node_id, reply_to_message_id="a" * 64 if sender == other else "")
        pushed = PushMessagesRequest(
            node=own, messages_list=[Message(metadata=metadata)], message_object_trees=[ObjectTree()]
        )
        assert status(site_1, "PushMessages", pushed) == 403, "no reply of its own"
    assert status(site_1, "PushMessages", PushMessagesRequest(node=own)) == 403
    public = public_key_to_bytes(new.public_key())
    assert status(new, "RegisterNode", RegisterNodeFleetRequest(public_key=public)) == 412
    assert status(new, "ActivateNode", ActivateNodeRequest(public_key=public, heartbeat_interval=30)) == 412


def test_a_recorded_request_is_refused_later_and_with_another_certificate(
    federation: Federation, stolen: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the node of site 0, with its signature, is sent again."""
    recorded: list[httpx.Request] = []

    def pull() -> None:
        client = fleet_client(federation, own, node_key(federation, 0))
        client._client.event_hooks = {"request": [recorded.append]}
        try:
            client.PullMessages(PullMessagesRequest(node=Node(node_id=federation.nodes[0])))
        finally:
            client.close()

    def send_again(request: httpx.Request, credentials: Path) -> int:
        return post(federation, FLEET, credentials, request.read(), headers=dict(request.headers))

    pull()
    assert send_again(recorded[0], own) == 200  # only with the site's certificate, and only for five minutes
    assert send_again(recorded[0], stolen) == 403
    monkeypatch.setattr(node_auth_http_interceptor, "now", lambda: datetime.now(UTC) - timedelta(seconds=310))
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        pull()  # as it was recorded five minutes ago
    assert send_again(recorded[1], own) == 401


def test_a_revoked_site_is_refused_after_a_reload_also_with_a_renewed_certificate(
    federation: Federation, stolen: Path, own: Path
) -> None:
    authority = Authority.load(federation.folder / "certificates")
    renewed = stolen.with_name("renewed")
    shutil.copy(authority.renew_site(1), f"{renewed}.crt")
    shutil.copy(f"{stolen}.key", f"{renewed}.key")
    assert post(federation, FLEET, stolen) == post(federation, FLEET, renewed) == 401
    assert (tls_status(federation, stolen), tls_status(federation, None)) == ("ok", "failed")
    before = access_log(federation, "site-1")
    federation.start_node(1, "synthetic=true")
    connected = 'pull-messages HTTP/1.1" 200'
    federation.wait_until(
        lambda: connected in access_log(federation, "site-1").removeprefix(before), "the node of site 1 connects"
    )
    authority.revoke_site(1)
    subprocess.run(["./start_proxy.sh", "-s", "reload"], cwd=federation.folder, check=True, capture_output=True)
    deadline = time.monotonic() + 30
    refused = 0  # in a row: workers from before the reload may answer for a moment
    while refused < 5 and time.monotonic() < deadline:
        refused = refused + 1 if post(federation, FLEET, stolen) == 400 else 0
        time.sleep(0.1)
    assert post(federation, FLEET, stolen) == post(federation, FLEET, renewed) == 400
    assert tls_status(federation, stolen) == "failed"
    node = federation.processes["site-1"]
    federation.wait_until(lambda: node.poll() is not None, "the node of the revoked site ends")
    assert "the proxy refuses this site's certificate" in federation.log("site-1")
    assert post(federation, FLEET, own) == 401


def access_log(federation: Federation, word: str) -> str:
    file = federation.folder / "proxy-access.log"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return "".join(line for line in lines if word in line)
