"""A node is bound to the certificate with which it comes through the proxy, and so to the number of its site."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from fastapi import HTTPException

from keel.deploy.certified_nodes import CertifiedNodes, certified_name
from keel.deploy.flower_adapter import SITE_HEADER, bind_certificates
from keel.deploy.reply_limit import FOLDER
from tests.deploy.in_process import InProcessFederation


def test_a_node_is_bound_to_its_first_certificate_also_after_a_restart(tmp_path: Path) -> None:
    nodes = CertifiedNodes(tmp_path / "state")
    assert nodes.accepts(7, "site-0")
    assert [nodes.accepts(7, "site-1"), nodes.accepts(7, "site-0"), nodes.accepts(8, "site-1")] == [False, True, True]
    assert not CertifiedNodes(tmp_path / "state").accepts(7, "site-1")


def test_a_request_with_the_certificate_of_another_site_is_refused(tmp_path: Path) -> None:
    authenticated: list[Any] = []
    handlers: dict[str, Any] = {"authenticate_node": authenticated.append}
    bind_certificates(handlers, CertifiedNodes(tmp_path))

    def send(message: SimpleNamespace, name: str | None) -> None:
        headers = {} if name is None else {SITE_HEADER: name}
        request = SimpleNamespace(state=SimpleNamespace(protobuf_request=message), headers=headers)
        handlers["authenticate_node"](request)

    pull = SimpleNamespace(node=SimpleNamespace(node_id=7))
    send(pull, "site-0")
    send(pull, None)  # from the server itself
    send(SimpleNamespace(public_key=b""), "site-1")  # before the node knows its ID
    for message in pull, SimpleNamespace(node_id=7):
        with pytest.raises(HTTPException, match="403"):
            send(message, "site-1")
    assert len(authenticated) == 5


def test_a_node_cannot_join_under_the_number_of_another_site(
    federation: InProcessFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "state"))
    certified = CertifiedNodes(tmp_path / "state")
    for node, name in (1, "site-0"), (2, "site-2"), (3, "site-2"):
        certified.accepts(node, name)
    assert (certified_name(2), certified_name(9)) == ("site-2", None)
    with pytest.raises(KeelError, match="site 1 did not connect"):
        federation()
    assert "rejected: claims to be site 1, but its certificate is that of site-2" in caplog.text


def test_a_node_whose_file_is_removed_is_bound_anew(tmp_path: Path) -> None:
    nodes = CertifiedNodes(tmp_path)
    assert nodes.accepts(7, "site-0")
    (tmp_path / "node-7").unlink()
    assert nodes.accepts(7, "site-1")
    assert not nodes.accepts(7, "site-0")
    assert nodes.name_of(7) == "site-1"
