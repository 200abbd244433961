"""Attacks on a server behind its proxy: with the public `ca.crt` alone, and with the credentials of a site.

One SuperLink, one nginx and one SuperNode, started by the template's scripts on free ports of 127.0.0.1.
"""

import json
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from keel.deploy.approval import Approval
from keel.deploy.authority import Authority
from keel.deploy.credentials import make_certificates, make_node_key
from keel.deploy.doctor import connection_findings
from keel.deploy.flower_adapter import build_bundle
from keel.deploy.new import new_federation
from tests.deploy.processes import NGINX, Federation

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt install nginx-light)")

HEADERS = {"content-type": "application/protobuf", "accept": "application/protobuf"}
FLEET = "/v1/fleet/pull-messages"
WITH_CERTIFICATE = """import sys
from pathlib import Path
from keel.deploy.flower_adapter import present_certificate
if sys.argv[1]:
    present_certificate(Path(sys.argv[1] + ".crt"), Path(sys.argv[1] + ".key"))
command, sys.argv = sys.argv[2], sys.argv[2:]
if command == "flwr":
    from flwr.cli.app import app
    app()
from flwr.supercore.cli import flower_superexec
flower_superexec()
"""


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
    folder = federation.folder.parent / "stolen"
    folder.mkdir()
    shutil.copy(federation.folder / "certificates" / "site-1.crt", folder)
    shutil.copy(federation.folder / "keys" / "site-1.key", folder)
    return folder / "site-1"


def post(federation: Federation, path: str, credentials: Path | None, content: bytes = b"", port: int = 0) -> int:
    """Return the status of a request to the proxy. A handshake that the proxy ends is an httpx.HTTPError."""
    context = ssl.create_default_context(cafile=str(federation.folder / "certificates" / "ca.crt"))
    if credentials is not None:
        context.load_cert_chain(f"{credentials}.crt", f"{credentials}.key")
    url = f"https://127.0.0.1:{port or federation.proxy_port}{path}"
    return httpx.post(url, content=content, headers=HEADERS, verify=context, trust_env=False, timeout=30).status_code


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
    before = federation.flwr("supernode", "list", "federation", "--format", "json").count("node-id")
    for credentials, status in (stolen, 403), (None, 400):
        seen = len(access_log(federation, ""))
        running = [
            subprocess.Popen(
                [sys.executable, "-c", WITH_CERTIFICATE, str(credentials or ""), *words],
                cwd=federation.folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for words in attacks.values()
        ]

        def refused(seen: int = seen, status: int = status) -> bool:
            log = access_log(federation, "")[seen:]
            return all(re.search(rf'"POST /v1/\w+/{path} HTTP/1.1" {status} ', log) for path in attacks)

        try:
            federation.wait_until(refused, f"all attacks are refused with {status}")
            codes = [process.wait(60) for process in running[:-1]]  # a superexec tries again and again
        finally:
            for process in running:
                process.kill()
                process.communicate()
        assert all(codes), codes
    assert federation.flwr("supernode", "list", "federation", "--format", "json").count("node-id") == before


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
    federation: Federation, stolen: Path
) -> None:
    """The node of site 0 pushes more than the server app of its run has announced; then it has site 1's certificate."""
    limits = federation.folder / ".server-state"
    limits.mkdir(exist_ok=True)
    (limits / "replies-5").write_text("1000")
    [node] = [
        each["node-id"]
        for each in json.loads(federation.flwr("supernode", "list", "federation", "--format", "json"))["nodes"]
        if each["status"] == "online"
    ]
    key = load_ssh_private_key((federation.folder / "keys" / "site-0").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    push = PushObjectRequest(node=Node(node_id=int(node)), run_id=5, object_id="0", object_content=bytes(2000))

    def stored(certificate: Path, key_file: Path) -> bool:
        context = ssl.create_default_context(cafile=str(federation.folder / "certificates" / "ca.crt"))
        context.load_cert_chain(certificate, key_file)
        client = FleetHttpClient(
            base_url=f"https://127.0.0.1:{federation.proxy_port}",
            verify=context,
            interceptors=[NodeAuthHttpInterceptor(key, key.public_key())],
        )
        try:
            return bool(client.PushObject(push).stored)
        finally:
            client.close()

    assert not stored(federation.folder / "certificates" / "site-0.crt", federation.folder / "keys" / "site-0.key")
    assert f"refused 2000 bytes of node {node}: more than a reply of run 5 can have" in federation.log("server")
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        stored(stolen.with_suffix(".crt"), stolen.with_suffix(".key"))
    assert f"refused a request of node {node}: it came with the certificate of site-1" in federation.log("server")


def test_a_revoked_site_is_refused_after_a_reload_also_with_a_renewed_certificate(
    federation: Federation, stolen: Path
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
    other = federation.folder.parent / "site-0"
    shutil.copy(federation.folder / "certificates" / "site-0.crt", f"{other}.crt")
    shutil.copy(federation.folder / "keys" / "site-0.key", f"{other}.key")
    assert post(federation, FLEET, other) == 401


def access_log(federation: Federation, word: str) -> str:
    file = federation.folder / "proxy-access.log"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return "".join(line for line in lines if word in line)
