"""Calls of a node to the server, as a thief of its credentials or a malicious site makes them."""

import shutil
import ssl
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from tests.deploy.processes import Federation


def fleet_client(federation: Federation, credentials: Path, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
    """A client of a node's calls with this certificate (`.crt` and `.key`) and this node key."""
    context = ssl.create_default_context(cafile=str(federation.folder / "certificates" / "ca.crt"))
    port = federation.port
    if "proxy" in federation.processes:
        context.load_cert_chain(f"{credentials}.crt", f"{credentials}.key")
        port = federation.proxy_port
    interceptors = [NodeAuthHttpInterceptor(key, key.public_key())]
    return FleetHttpClient(base_url=f"https://127.0.0.1:{port}", verify=context, interceptors=interceptors)


def site_credentials(federation: Federation, site: int, folder: Path) -> Path:
    """Copy a site's certificate and its private key to a folder. Return their path without the extension."""
    folder.mkdir(exist_ok=True)
    shutil.copy(federation.folder / "certificates" / f"site-{site}.crt", folder)
    shutil.copy(federation.folder / "keys" / f"site-{site}.key", folder)
    return folder / f"site-{site}"


def node_key(federation: Federation, site: int) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key((federation.folder / "keys" / f"site-{site}").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def pushed(federation: Federation, site: int) -> list[PushMessagesRequest]:
    """Return what the node of a site has pushed so far: the IDs and sizes of its replies."""
    content = (federation.folder / f"pushed-{federation.nodes[site]}.bin").read_bytes()
    requests = []
    while content:
        size = int.from_bytes(content[:4], "big")
        requests.append(PushMessagesRequest.FromString(content[4 : 4 + size]))
        content = content[4 + size :]
    return requests
