"""`keel deploy doctor`: each check fails when what it checks is wrong, and none prints an example."""

import json
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.deploy import authority, credentials
from keel.deploy.approval import Approval
from keel.deploy.credentials import make_certificates, make_node_key
from keel.deploy.data_doctor import data_findings
from keel.deploy.doctor import (
    Finding,
    connection_findings,
    machine_findings,
    server_findings,
    site_findings,
    site_identity,
)
from keel.deploy.flower_adapter import build_bundle
from keel.deploy.new import new_federation
from keel.deploy.proxy import proxy_values, write_proxy


class Quiet(BaseHTTPRequestHandler):
    status = 404

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A TLS server with a certificate of a federation's authority: its address and the folder of the certificates."""
    folder = tmp_path_factory.mktemp("tls") / "certificates"
    make_certificates(folder, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with HTTPServer(("127.0.0.1", 0), Quiet) as http:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{http.server_port}", folder
        http.shutdown()
        thread.join()


def statuses(findings: Iterator[Finding]) -> dict[str, str]:
    return {finding.check: finding.status for finding in findings}


def test_a_good_connection(server: tuple[str, Path]) -> None:
    address, folder = server
    found = statuses(connection_findings(address, folder / "ca.crt"))
    assert found == {"port": "ok", "tls": "ok", "clock": "ok"}


@pytest.mark.parametrize("seconds", [30, -30])
def test_a_clock_that_is_wrong_by_30_seconds_fails(server: tuple[str, Path], seconds: int) -> None:
    address, folder = server
    *_, clock = connection_findings(
        address, folder / "ca.crt", now=lambda: datetime.now(UTC) + timedelta(seconds=seconds)
    )
    assert clock.status == "failed"
    assert ("ahead of" if seconds > 0 else "behind") in clock.text


def test_another_authority_and_a_closed_port_fail(server: tuple[str, Path], tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1"])
    assert statuses(connection_findings(server[0], tmp_path / "ca.crt")) == {"port": "ok", "tls": "failed"}
    assert statuses(connection_findings("127.0.0.1:1", tmp_path / "ca.crt")) == {"port": "failed"}
    assert statuses(connection_findings("nonsense", tmp_path / "ca.crt")) == {"port": "failed"}


def test_a_certificate_that_the_proxy_refuses_fails(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = server
    monkeypatch.setattr(Quiet, "status", 400)
    *_, refused = connection_findings(address, folder / "ca.crt")
    assert (refused.check, refused.status) == ("tls", "failed")
    assert "the proxy refuses a connection without a site's certificate" in refused.text
    request = make_node_key(tmp_path / "keys/site-3").with_suffix(".csr")
    identity = site_identity(tmp_path, {"site": 3})
    assert identity is not None
    (missing,) = connection_findings(address, folder / "ca.crt", identity)
    assert "site-3.crt does not exist" in missing.text
    certificate = authority.Authority.load(folder).certify_site(3, request)
    (tmp_path / "certificates").mkdir()
    certificate.rename(identity[0])
    *_, refused = connection_findings(address, folder / "ca.crt", identity)
    assert refused.text.startswith("the proxy refuses this certificate; ")


@pytest.mark.parametrize(("days", "status"), [(-1, "failed"), (20, "warning"), (40, "ok")])
def test_certificates_are_reported_before_they_expire(
    days: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifetime = timedelta(days=days, hours=1) if days > 0 else timedelta(hours=-1)
    monkeypatch.setattr(authority, "LIFETIME", lifetime)
    monkeypatch.setattr(credentials, "CA_LIFETIME", lifetime)
    make_certificates(tmp_path / "certificates", ["127.0.0.1"])
    found = statuses(machine_findings(tmp_path, at_site=False))
    assert found["certificate ca.crt"] == found["certificate server.crt"] == status


def test_a_site_without_a_valid_policy_or_an_approval_fails(tmp_path: Path) -> None:
    new_federation(tmp_path / "ward", 1, "fedavg")
    assert statuses(site_findings(tmp_path / "ward")) == {"policy": "ok", "approval": "failed"}
    Approval(tmp_path / "ward/approved").approve(build_bundle(tmp_path / "ward"))
    (tmp_path / "ward/site.toml").write_text("min_batch = 'eight'")
    assert statuses(site_findings(tmp_path / "ward")) == {"policy": "failed", "approval": "ok"}


def test_missing_certificates_have_another_remedy_on_the_server_than_at_a_site(tmp_path: Path) -> None:
    def text(at_site: bool) -> str:
        return next(each.text for each in machine_findings(tmp_path, at_site) if each.check == "certificates")

    assert "run keel deploy certificates HOST" in text(at_site=False)
    assert "copy ca.crt and site-N.crt from the server" in text(at_site=True)


def test_the_server_is_checked_at_its_port_and_at_that_of_the_proxy(server: tuple[str, Path], tmp_path: Path) -> None:
    new_federation(tmp_path / "ward", 1, "fedavg")
    port = int(server[0].rpartition(":")[2])
    write_proxy(tmp_path / "ward", proxy_values(listen="127.0.0.1:1"))
    assert statuses(server_findings(tmp_path / "ward", port)) == {"flwr": "ok", "server": "ok", "proxy": "warning"}
    proxy = [finding.text for finding in server_findings(tmp_path / "ward", 1) if finding.check == "proxy"]
    assert proxy == ["nothing listens on port 1; start it with ./start_proxy.sh"]
    write_proxy(tmp_path / "ward", proxy_values(listen=f"127.0.0.1:{port}"))
    assert statuses(server_findings(tmp_path / "ward", 1)) == {"flwr": "ok", "server": "warning", "proxy": "ok"}
    (tmp_path / "ward/nginx.conf").unlink()
    assert statuses(server_findings(tmp_path / "ward", port)) == {"flwr": "ok", "server": "ok", "proxy": "failed"}


def test_a_moved_folder_is_reported_and_new_certificates_mend_it(tmp_path: Path, keel: Any) -> None:
    """Flower demands the absolute path of the authority's certificate."""
    new_federation(tmp_path / "ward", 1, "fedavg")
    moved = (tmp_path / "ward").rename(tmp_path / "server")
    flwr = next(finding for finding in server_findings(moved, 1) if finding.check == "flwr")
    assert flwr.status == "failed"
    assert flwr.text.endswith(f"set root-certificates to {moved / 'certificates/ca.crt'}")
    assert keel("deploy", "certificates", "127.0.0.1", "--out", str(moved / "certificates")).code == 0
    assert statuses(server_findings(moved, 1))["flwr"] == "ok"
    (moved / ".flwr/config.toml").write_text("[superlink]\n")
    assert statuses(server_findings(moved, 1))["flwr"] == "failed"


def test_a_key_that_others_can_read_fails(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certificates", ["127.0.0.1"])
    make_node_key(tmp_path / "keys/site-0")
    keys = {
        name for name, status in statuses(machine_findings(tmp_path, at_site=False)).items() if name.startswith("key ")
    }
    assert keys == {"key ca.key", "key server.key", "key site-0", "key site-0.key"}
    assert "failed" not in statuses(machine_findings(tmp_path, at_site=False)).values()
    (tmp_path / "certificates/server.key").chmod(0o644)
    assert statuses(machine_findings(tmp_path, at_site=False))["key server.key"] == "failed"


SECRET = 19480312.0


def examples() -> Any:
    return np.full((40, 3), SECRET), np.arange(40) % 2


def with_missing(inputs: np.ndarray, labels: np.ndarray) -> Any:
    inputs[4, 1] = np.nan
    return inputs, labels


def with_label(value: int) -> Any:
    def change(inputs: np.ndarray, labels: np.ndarray) -> Any:
        labels[7] = value
        return inputs, labels

    return change


DATA = {
    "good": (lambda inputs, labels: (inputs, labels), None, ""),
    "missing": (with_missing, "training missing values", "1 in 1 examples, columns 1"),
    "label": (with_label(19480312), "training labels", "1 are not from 0 to 1"),
    "negative label": (with_label(-1), "training labels", "1 are not from 0 to 1"),
    "columns": (lambda inputs, labels: (inputs[:, :2], labels), "model", "does not accept one example of shape [2]"),
    "too few labels": (lambda inputs, labels: (inputs, labels[1:]), "training examples", "39 labels"),
}


@pytest.mark.parametrize("case", DATA)
def test_the_loader_is_checked_without_printing_a_value(case: str) -> None:
    change, check, text = DATA[case]
    findings = list(data_findings(lambda: nn.Linear(3, 2), lambda node: change(*examples()), {}))
    failed = {finding.check: finding.text for finding in findings if finding.status == "failed"}
    assert list(failed) == ([] if check is None else [check])
    assert all(text in message for message in failed.values())
    assert not any("19480312" in finding.text for finding in findings)


def test_labels_have_the_rule_of_the_site() -> None:
    def found(outputs: int, labels: np.ndarray) -> str:
        return statuses(data_findings(lambda: nn.Linear(3, outputs), lambda node: (np.ones((40, 3)), labels), {}))[
            "training labels"
        ]

    assert found(1, np.arange(40) % 2) == "failed"
    assert found(2, np.where(np.arange(80).reshape(40, 2) % 4 == 3, -100, np.arange(80).reshape(40, 2) % 2)) == "ok"


def test_a_loader_that_raises_gives_only_the_class_of_the_error() -> None:
    def loader(node: Any) -> Any:
        raise ValueError("could not convert 'Jane Doe'")

    (finding,) = data_findings(lambda: nn.Linear(3, 2), loader, {})
    assert finding.status == "failed"
    assert "ValueError" in finding.text
    assert "Jane" not in finding.text


def test_the_command_checks_a_sites_real_data(keel: Any, tmp_path: Path) -> None:
    keel("deploy", "new", "doctored")
    make_certificates(tmp_path / "doctored/certificates", ["127.0.0.1"])
    make_node_key(tmp_path / "doctored/keys/site-0")
    Approval(tmp_path / "doctored/approved").approve(build_bundle(tmp_path / "doctored"))
    rows = [",".join(["0.5"] * 10 + [str(row % 2)]) for row in range(50)]
    file = tmp_path / "patients.csv"
    file.write_text("\n".join([",".join("abcdefghijk"), *rows]))
    config = f'site=0 data="{file}"'
    good = keel("deploy", "doctor", "doctored", "--node-config", config, "--json")
    assert good.code == 0, good.out
    assert json.loads(good.out)["ok"] is True
    file.write_text(file.read_text().replace("0.5,1", "0.5,7", 1))
    bad = keel("deploy", "doctor", "doctored", "--node-config", config)
    assert bad.code == 1
    assert "failed" in bad.out
    assert "not from 0 to 1, the classes of the model" in bad.out


def test_the_command_runs_the_approved_app_and_says_if_there_is_none(keel: Any, tmp_path: Path) -> None:
    keel("deploy", "new", "unread")
    task = tmp_path / "unread/unread/task.py"
    approved = task.read_text()
    config = ("--node-config", "site=0 synthetic=true")
    Approval(tmp_path / "unread/approved").approve(build_bundle(tmp_path / "unread"))
    task.write_text("raise RuntimeError('not approved')\n")
    found = keel("deploy", "doctor", "unread", *config)
    assert "ok       app: the checks of the data ran the approved app" in found.out, found.err
    assert "ok       loader" in found.out
    task.write_text(approved)
    for file in (tmp_path / "unread/approved").iterdir():
        file.unlink()
    found = keel("deploy", "doctor", "unread", *config)
    assert "warning  app: no app is approved; these checks ran the folder's own files" in found.out
