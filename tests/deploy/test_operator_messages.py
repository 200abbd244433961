"""What an operator reads: states, refusals and errors name the site, the file and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from keel.core.flat_model import FlatModel
from keel.deploy import sites
from keel.deploy.audit import AuditLog
from keel.deploy.authority import Authority
from keel.deploy.credentials import make_certificates, make_node_key
from keel.deploy.remedies import with_remedy
from keel.deploy.versions import installed_versions
from tests.conftest import Called
from tests.deploy.in_process import InProcessFederation, network, site_examples
from tests.deploy.requests import ask, audit_lines

EVERYONE: dict[str, Any] = {"participation__rate": 1.0}
Keel = Callable[..., Called]


def larger() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def fails(node: dict[str, Any]) -> Any:
    if node["site"] == 1:
        raise ValueError("could not convert 'Jane Doe'")
    return site_examples(node["site"])


def test_the_status_of_a_run_that_waits_for_its_sites(keel: Keel, tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "run.audit.jsonl")
    log.append("start")
    called = keel("deploy", "status", "run")
    assert called.code == 0
    assert called.out.startswith("waiting for its sites since ")
    assert ", no site connected: run" in called.out
    log.append("join", site=2, node=7)
    log.append("refusal", node=8, reason="approval: AppNotApproved")
    called = keel("deploy", "status", "run", "--json")
    state = json.loads(called.out)
    assert (called.code, state["status"], state["ok"]) == (0, "waiting", True)
    assert ", site 2 connected: run" in state["lines"][0]
    assert state["lines"][1] == "node 8 refused: approval: AppNotApproved"
    log.append("failed", error="KeelError", reason="site 1 did not connect")
    called = keel("deploy", "status", "run")
    assert (called.code, called.out.splitlines()[:2]) == (1, ["not started: run", "KeelError: site 1 did not connect"])
    log.append("start")
    assert keel("deploy", "status", "run").out.count("refused") == 0
    assert keel("deploy", "status", "another").code == 2
    log.path.write_text("{}\n")
    damaged = keel("deploy", "status", "run")
    assert damaged.code == 2
    assert "run.audit.jsonl' is damaged: line 1: is not a line of an audit log; keel deploy audit verify" in damaged.err


def test_a_changed_model_names_the_run_and_leaves_it_finished(federation: InProcessFederation, keel: Keel) -> None:
    run = federation(rounds=1, **EVERYONE)
    files = {file: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    for rounds in 1, 2:
        with pytest.raises(KeelError) as caught:
            federation(model=larger, rounds=rounds, **EVERYONE)
        assert f"federation.out = {str(run.path)!r} has a run of another model (39 parameters then, 57 now)" in str(
            caught.value
        )
        assert "set federation.out to a new folder" in str(caught.value)
    assert {file: file.read_bytes() for file in files} == files
    assert keel("deploy", "status", str(run.path)).code == 0


def test_a_refusal_names_the_site_and_the_remedy_once(
    federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sites, "RETRY_SECONDS", 0.0)
    with pytest.raises(KeelError, match="site 1 did not connect"):
        federation(data=fails, **EVERYONE)
    refusals = [record.getMessage() for record in caplog.records if "rejected" in record.getMessage()]
    assert refusals == [
        "node 2 (missing: site 1, 2) rejected: data: ValueError; run keel deploy doctor at the site; its log has the "
        "text of the error"
    ]
    federation(**EVERYONE, rounds=1, out="joined")
    caplog.clear()
    federation(data=fails, **EVERYONE, rounds=2, out="joined")
    assert "node 2 (site 1) rejected: data: ValueError; " in caplog.text


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("approval: AppNotApproved", "; run keel deploy approve at the site"),
        ("policy:min_batch: PolicyRefusal", "; change the settings of the run, or min_batch in the site's site.toml"),
        ("late: no reply within 600 s", "late: no reply within 600 s"),
        ("version:0.0.1: OtherVersion", "this site has 0.0.1; upgrade this site"),
        ("version:99.0: OtherVersion", "this site has 99.0; upgrade the server"),
        ("version:nonsense: OtherVersion", "this site has nonsense; upgrade this site"),
    ],
)
def test_remedies(reason: str, remedy: str) -> None:
    assert remedy in with_remedy(reason)


def test_a_newer_server_is_reported_as_such_and_not_as_an_unknown_field(tmp_path: Path) -> None:
    node, theta = {"state-dir": str(tmp_path)}, FlatModel(network()).weights
    newer = {"keel": "99.0", "spec": "a_field_of_the_future = 1"}
    reply = ask("query", network, lambda node: site_examples(0), node, theta, crafted=newer)
    assert reply.error.reason == f"version:{installed_versions()['keel']}: OtherVersion"
    same = {"keel": installed_versions()["keel"]}
    assert not ask("query", network, lambda node: site_examples(0), node, theta, crafted=same).has_error()


def test_audit_logs_have_the_settings_themselves(federation: InProcessFederation, tmp_path: Path) -> None:
    run = federation(rounds=2, **EVERYONE)
    start = json.loads(run.path.with_name("run.audit.jsonl").read_text().splitlines()[0])
    assert start["spec"] == (run.path / "spec.toml").read_text()
    assert start["federation"]["sites"] == 3
    lines = audit_lines(tmp_path / "site-0")
    assert [line["settings"] for line in lines] == [lines[0]["settings"]] * len(lines)
    assert lines[0]["spec"] == start["spec"]
    assert [line["kind"] for line in lines if "spec" in line] == ["query"]


def test_revoke_prints_the_command_that_unregisters_the_node(keel: Keel, tmp_path: Path) -> None:
    make_certificates(tmp_path / "certificates", ["127.0.0.1"])
    for site in 0, 1:
        request = make_node_key(tmp_path / f"keys/site-{site}").with_suffix(".csr")
        Authority.load(tmp_path / "certificates").certify_site(site, request)
    for name, node in ("first", 11), ("second", 12):
        AuditLog(tmp_path / f"runs/{name}.audit.jsonl").append("join", site=0, node=node)
    assert "flwr supernode unregister 12 federation\n" in keel("deploy", "revoke", "0").out
    unknown = keel("deploy", "revoke", "1").out
    assert "flwr supernode unregister NODE-ID federation (site 1 has joined no training here" in unknown


def test_a_key_of_the_authority_that_is_kept_offline_is_not_a_missing_set_up(keel: Keel, tmp_path: Path) -> None:
    make_certificates(tmp_path / "certificates", ["127.0.0.1"])
    (tmp_path / "certificates/ca.key").unlink()
    for words in ["renew"], ["revoke", "0"], ["site-certificate", "0"]:
        called = keel("deploy", *words)
        assert called.code == 2
        assert "ca.key does not exist; if it is kept offline, bring it here for this command" in called.err
