"""The commands of `keel deploy`."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.supercore.protobuf.client import ProtobufClient

from keel.deploy.credentials import make_certificates
from keel.deploy.site_data import all_sites
from tests.conftest import Called

Keel = Callable[..., Called]


def test_a_new_federation_passes_its_check(keel: Keel, tmp_path: Path) -> None:
    created = keel("deploy", "new", "ward-nine", "--sites", "4", "--algorithm", "scaffold")
    assert created.code == 0
    assert "Next: keel deploy check ward-nine" in created.out
    app = tomllib.loads((tmp_path / "ward-nine/pyproject.toml").read_text())
    assert app["project"]["dependencies"] == []
    checked = keel("deploy", "check", "ward-nine", "--rounds", "2")
    assert checked.code == 0, checked.err
    assert "finished: 2 rounds over 4 sites with synthetic data (80, 160, 240, 80 examples)" in checked.out
    assert not any("@" in path.read_text() for path in (tmp_path / "ward-nine").rglob("*.py"))
    for script in (tmp_path / "ward-nine").glob("*.sh"):
        assert os.access(script, os.X_OK)
        subprocess.run(["sh", "-n", script], check=True)


@pytest.mark.parametrize("algorithm", ["fedhbm", "scaffold"])
def test_the_check_shows_that_the_federation_equals_the_simulation(
    algorithm: str, keel: Keel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"same-{algorithm}"
    keel("deploy", "new", name, "--algorithm", algorithm)
    checked = keel("deploy", "check", name, "--rounds", "2", "--simulate")
    assert checked.code == 0, checked.err
    first, second = re.findall(r"model of the \w+ (\w{64})", checked.out)
    assert first == second
    monkeypatch.setattr("keel.deploy.check.all_sites", lambda data: all_sites(data[::-1]))  # other clients
    assert "differs from the simulation" in keel("deploy", "check", name, "--rounds", "2", "--simulate").err


def test_the_template_loads_a_sites_csv_file(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "csv-file")
    rows = [",".join(["0.5"] * 10 + [str(row % 2)]) for row in range(20)]
    (tmp_path / "patients.csv").write_text("\n".join([",".join("abcdefghijk"), *rows]))
    task = load_task(tmp_path / "csv-file/csv_file/task.py")
    (inputs, labels), (_, test_labels) = task.site_data({"site": 0, "data": str(tmp_path / "patients.csv")})
    assert inputs.shape == (16, 10)
    assert (len(labels), len(test_labels)) == (16, 4)


def load_task(path: Path) -> Any:
    module = importlib.util.spec_from_file_location(path.parent.name, path)
    assert module is not None
    assert module.loader is not None
    task = importlib.util.module_from_spec(module)
    module.loader.exec_module(task)
    return task


def test_the_templates_test_part_is_shuffled_and_does_not_depend_on_the_order_of_the_file(
    keel: Keel, tmp_path: Path
) -> None:
    keel("deploy", "new", "sorted-file")
    task = load_task(tmp_path / "sorted-file/sorted_file/task.py")
    rows = [",".join([str(row)] * 10 + [str(int(row >= 50))]) for row in range(100)]  # sorted by class
    parts = []
    for name, lines in ("sorted.csv", rows), ("reversed.csv", rows[::-1]):
        (tmp_path / name).write_text("\n".join([",".join("abcdefghijk"), *lines]))
        (inputs, _), (test_inputs, test_labels) = task.site_data({"site": 0, "data": str(tmp_path / name)})
        assert set(test_labels.tolist()) == {0, 1}
        assert (len(inputs), len(test_inputs)) == (80, 20)
        assert not set(inputs[:, 0]) & set(test_inputs[:, 0])
        parts.append(test_inputs.tolist())
    assert parts[0] == parts[1]


def test_the_check_runs_under_the_policy_of_the_folder(
    keel: Keel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keel("deploy", "new", "strict", "--sites", "1")
    assert keel("deploy", "check", "strict", "--rounds", "1").code == 0
    policy = tmp_path / "strict/site.toml"
    policy.write_text(policy.read_text().replace("min_batch = 8", "min_batch = 17"))
    checked = keel("deploy", "check", "strict", "--rounds", "1")
    assert checked.code == 2
    assert "node 1 (missing: site 0) rejected: policy:min_batch: PolicyRefusal; change the settings" in caplog.text
    assert "or was rejected (policy:min_batch: PolicyRefusal; change the settings" in checked.err


def test_the_check_names_an_invalid_field_of_the_policy(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "typed", "--sites", "1")
    policy = tmp_path / "typed/site.toml"
    policy.write_text(policy.read_text().replace("min_batch = 8", 'min_batch = "eight"'))
    checked = keel("deploy", "check", "typed", "--rounds", "1")
    assert (checked.code, checked.err.count("\n")) == (2, 1)
    assert "min_batch must be a valid integer (got 'eight')" in checked.err


@pytest.fixture
def _restored_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore Flower's client after a test in whose process a node presents its certificate."""
    monkeypatch.setattr(ProtobufClient, "__init__", ProtobufClient.__init__)


@pytest.mark.usefixtures("_restored_client")
def test_a_node_starts_neither_without_an_approval_nor_with_unquoted_settings(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "unapproved")
    (tmp_path / "site.toml").write_text((tmp_path / "unapproved/site.toml").read_text())
    make_certificates(tmp_path / "certificates", ["127.0.0.1"])
    files = ("--certificate", "certificates/server.crt", "--certificate-key", "certificates/server.key")
    called = keel("deploy", "node", *files, "--superlink", "127.0.0.1:1")
    assert called.code == 2
    assert "no app is approved" in called.err
    assert keel("deploy", "approve", "unapproved", "--yes").code == 0
    called = keel("deploy", "node", *files, "--superlink", "127.0.0.1:1", "--node-config", "site=0 data=/srv/a.csv")
    assert (called.code, called.err.count("\n")) == (2, 1)
    assert "texts in double quotes" in called.err


@pytest.mark.usefixtures("_restored_client")
def test_a_node_does_not_start_without_a_policy(keel: Keel, tmp_path: Path) -> None:
    make_certificates(tmp_path / "certificates", ["127.0.0.1"])
    files = ("--certificate", "certificates/server.crt", "--certificate-key", "certificates/server.key")
    called = keel("deploy", "node", *files, "--superlink", "127.0.0.1:1")
    assert (called.code, called.err.count("\n")) == (2, 1)
    assert "policy 'site.toml' cannot be read" in called.err


def test_a_site_starts_with_private_files_and_only_the_approved_app(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "private")
    script = (tmp_path / "private/start_site.sh").read_text()
    assert "umask 077" in script
    assert "keel deploy node" in script
    assert "flower-supernode" not in script


def test_every_script_in_the_generated_readme_exists(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "documented")
    text = (tmp_path / "documented/README.md").read_text()
    for script in re.findall(r"\./(\w+\.sh)", text):
        assert (tmp_path / "documented" / script).is_file()
    assert "@" not in text
    assert "localghbm" in text


def test_the_scripts_require_tls_and_keys(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "guarded")
    scripts = {path.name: path.read_text() for path in (tmp_path / "guarded").glob("*.sh")}
    assert "--ssl-certfile" in scripts["start_server.sh"]
    assert "--enable-supernode-auth" in scripts["start_server.sh"]
    assert "--host 127.0.0.1 " in scripts["start_server.sh"]
    assert "--root-certificates" in scripts["start_site.sh"]
    assert "--auth-supernode-private-key" in scripts["start_site.sh"]
    assert not any("insecure" in script for script in scripts.values())


def test_the_check_names_the_site_that_fails(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "broken-site")
    task = tmp_path / "broken-site/broken_site/task.py"
    task.write_text(
        task.read_text().replace("def synthetic(site):", "def synthetic(site):\n    if site == 1: raise OSError")
    )
    checked = keel("deploy", "check", "broken-site")
    assert checked.code == 2
    assert "site 1 did not connect" in checked.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "My Federation"], "up to 32 letters"),
        (["new", "here", "--algorithm", "fedavgg"], "did you mean 'fedavg'"),
        (["new", "here", "--algorithm", "centralized"], "must be a federated one"),
        (["check", "nowhere"], "keel deploy new"),
        (["proxy"], "keel deploy new"),
        (["proxy", "--listen", "8443; root /"], "listen must be an IP address and a port"),
        (["proxy", "--largest-body", "0"], "largest-body must be a number with the unit"),
        (
            ["node", "--certificate", "site-0.crt", "--certificate-key", "site-0.key", "--insecure"],
            "site-0.crt does not exist",
        ),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(
    keel: Keel, tmp_path: Path, words: list[str], message: str
) -> None:
    called = keel("deploy", *words)
    assert called.code == 2
    assert message in called.err
    assert called.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_changed(keel: Keel, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    assert "exists" in keel("deploy", "new", "taken").err
    assert list((tmp_path / "taken").iterdir()) == []


def test_the_error_without_flower_names_the_extra(keel: Keel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.cli.deploy.find_spec", lambda name: None)
    called = keel("deploy", "key", "keys/site-0")
    assert called.code == 2
    assert "keel-fl[flower]" in called.err


def test_help_needs_neither_flower_nor_torch() -> None:
    program = "import sys, keel.cli; assert not {'flwr', 'torch', 'cryptography'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
