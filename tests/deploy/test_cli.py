"""`keel deploy` as a user calls it."""

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
    made = keel("deploy", "new", "ward-nine", "--sites", "4", "--algorithm", "scaffold")
    assert made.code == 0
    assert "Next: keel deploy check ward-nine" in made.out
    app = tomllib.loads((tmp_path / "ward-nine/pyproject.toml").read_text())
    assert app["project"]["dependencies"] == []
    checked = keel("deploy", "check", "ward-nine", "--rounds", "2")
    assert checked.code == 0, checked.err
    assert "finished: 2 rounds over 4 made-up sites with 80, 160, 240, 80 examples" in checked.out
    assert not any("@" in path.read_text() for path in (tmp_path / "ward-nine").rglob("*.py"))
    for script in (tmp_path / "ward-nine").glob("*.sh"):
        assert os.access(script, os.X_OK)
        subprocess.run(["sh", "-n", script], check=True)


def test_the_template_reads_a_sites_own_file(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "own-file")
    rows = [",".join(["0.5"] * 10 + [str(row % 2)]) for row in range(20)]
    (tmp_path / "patients.csv").write_text("\n".join([",".join("abcdefghijk"), *rows]))
    found = importlib.util.spec_from_file_location("own_file_task", tmp_path / "own-file/own_file/task.py")
    assert found is not None
    assert found.loader is not None
    task = importlib.util.module_from_spec(found)
    found.loader.exec_module(task)
    (inputs, labels), (_, tested) = task.site_data({"site": 0, "data": str(tmp_path / "patients.csv")})
    assert inputs.shape == (16, 10)
    assert (len(labels), len(tested)) == (16, 4)


def test_every_command_of_the_generated_readme_is_there(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "told")
    text = (tmp_path / "told/README.md").read_text()
    for script in re.findall(r"\./(\w+\.sh)", text):
        assert (tmp_path / "told" / script).is_file()
    assert "@" not in text
    assert "fedhbm" in text


def test_the_scripts_ask_for_tls_and_keys(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "guarded")
    scripts = {path.name: path.read_text() for path in (tmp_path / "guarded").glob("*.sh")}
    assert "--ssl-certfile" in scripts["start_server.sh"]
    assert "--enable-supernode-auth" in scripts["start_server.sh"]
    assert "--root-certificates" in scripts["start_site.sh"]
    assert "--auth-supernode-private-key" in scripts["start_site.sh"]
    assert not any("insecure" in script for script in scripts.values())


def test_an_app_that_fails_on_a_site_is_said_to(keel: Keel, tmp_path: Path) -> None:
    keel("deploy", "new", "broken-site")
    task = tmp_path / "broken-site/broken_site/task.py"
    task.write_text(
        task.read_text().replace("def made_up(site):", "def made_up(site):\n    if site == 1: raise OSError")
    )
    checked = keel("deploy", "check", "broken-site")
    assert checked.code == 2
    assert "site 1 did not come" in checked.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "My Federation"], "accepted: up to 32 letters"),
        (["new", "here", "--algorithm", "fedavgg"], "did you mean 'fedavg'"),
        (["new", "here", "--algorithm", "centralized"], "no federation's"),
        (["check", "nowhere"], "keel deploy new"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(
    keel: Keel, tmp_path: Path, words: list[str], message: str
) -> None:
    called = keel("deploy", *words)
    assert called.code == 2
    assert message in called.err
    assert called.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(keel: Keel, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    assert "exists" in keel("deploy", "new", "taken").err
    assert list((tmp_path / "taken").iterdir()) == []


def test_without_flower_the_extra_is_named(keel: Keel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.commands.deploy.find_spec", lambda name: None)
    called = keel("deploy", "key", "keys/site-0")
    assert called.code == 2
    assert "keel-fl[flower]" in called.err


def test_help_needs_neither_flower_nor_torch() -> None:
    program = "import sys, keel.cli; assert not {'flwr', 'torch', 'cryptography'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
