"""The commands of `keel deploy`."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

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


def test_the_template_loads_a_sites_csv_file(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "csv-file")
    rows = [",".join(["0.5"] * 10 + [str(row % 2)]) for row in range(20)]
    (tmp_path / "patients.csv").write_text("\n".join([",".join("abcdefghijk"), *rows]))
    module = importlib.util.spec_from_file_location("csv_file_task", tmp_path / "csv-file/csv_file/task.py")
    assert module is not None
    assert module.loader is not None
    task = importlib.util.module_from_spec(module)
    module.loader.exec_module(task)
    (inputs, labels), (_, test_labels) = task.site_data({"site": 0, "data": str(tmp_path / "patients.csv")})
    assert inputs.shape == (16, 10)
    assert (len(labels), len(test_labels)) == (16, 4)


def test_every_script_in_the_generated_readme_exists(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "documented")
    text = (tmp_path / "documented/README.md").read_text()
    for script in re.findall(r"\./(\w+\.sh)", text):
        assert (tmp_path / "documented" / script).is_file()
    assert "@" not in text
    assert "fedhbm" in text


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
        (["supernode", "site-0.crt", "site-0.key", "--insecure"], "site-0.crt does not exist"),
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
