"""The units, the compose files and the scripts of a new federation are valid and closed."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

import yaml

from keel.deploy.new import new_federation

FLWR = Path(sys.executable).with_name("flwr")
UNITS = "keel-server.service", "keel-proxy.service", "keel-site@.service"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("services") / "ward-nine"
    new_federation(folder, 3, "fedavg")
    return folder


def services(folder: Path) -> dict[str, dict[str, Any]]:
    files = [folder / "containers" / name for name in ("server.yaml", "site.yaml")]
    return {name: service for file in files for name, service in yaml.safe_load(file.read_text())["services"].items()}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_every_line_of_the_units(folder: Path) -> None:
    units = [str(folder / "systemd" / unit.replace("@.", "@0.")) for unit in UNITS]
    (folder / "systemd" / "keel-site@0.service").symlink_to("keel-site@.service")
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    about_ours = [line for line in done.stderr.splitlines() if "keel-" in line]
    assert about_ours == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_rates_the_exposure_of_each_unit_as_ok(folder: Path, unit: str) -> None:
    """At most 2.0 of 10, where a unit without restrictions has 9.6."""
    file = str(folder / "systemd" / unit)
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_units_drop_privileges_and_limit_resources(folder: Path, unit: str) -> None:
    lines = (folder / "systemd" / unit).read_text().splitlines()
    closed = {"User=keel", "NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet=", "UMask=0077"}
    assert closed <= set(lines)
    assert any(line.startswith("MemoryMax=") for line in lines)
    assert any(line.startswith("ReadOnlyPaths=/var/lib/ward-nine/") for line in lines)


def test_a_site_cannot_write_its_policy_or_its_approval_and_no_service_reads_the_key_of_the_ca(
    folder: Path,
) -> None:
    site = (folder / "systemd" / "keel-site@.service").read_text().splitlines()
    assert not any(line.startswith("ReadWritePaths=") for line in site)
    assert "StateDirectory=ward-nine/client-state ward-nine/.flwr-site-%i" in site
    for unit in "keel-server.service", "keel-proxy.service":
        lines = (folder / "systemd" / unit).read_text().splitlines()
        assert "InaccessiblePaths=-/var/lib/ward-nine/certificates/ca.key" in lines
    found = services(folder)
    writable = [volume.split(":/")[1] for volume in found["site"]["volumes"] if not volume.endswith(":ro")]
    assert writable == ["federation/client-state", "federation/.flwr-site-${SITE:?}"]
    for name in "server", "proxy":
        assert "/dev/null:/federation/certificates/ca.key:ro" in found[name]["volumes"]


@pytest.mark.skipif(
    shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode,
    reason="docker compose is not installed",
)
@pytest.mark.parametrize("file", ["server.yaml", "site.yaml"])
def test_compose_accepts_the_files(folder: Path, file: str) -> None:
    command = ["env", "SITE=0", "SERVER=keel.example.org:8443", "DATA=/srv/patients", "docker", "compose"]
    subprocess.run([*command, "--file", str(folder / "containers" / file), "config", "--quiet"], check=True)


def test_containers_are_unprivileged_read_only_and_limited(folder: Path) -> None:
    found = services(folder)
    assert set(found) == {"server", "proxy", "site"}
    for service in found.values():
        assert service["user"] == "10001:10001"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert {"mem_limit", "pids_limit"} <= set(service)
        assert "../certificates:/federation/certificates:ro" in service["volumes"]
        assert (folder / service["command"][1]).is_file()
    assert found["site"]["volumes"][-1].endswith(":/data:ro")
    assert "ports" not in found["site"]
    assert found["proxy"]["network_mode"] == "service:server"
    image = (folder / "containers" / "Containerfile").read_text()
    assert "USER keel" in image
    assert "--uid 10001" in image


def test_the_app_that_sites_get_has_its_code_and_no_file_of_the_server(folder: Path) -> None:
    (folder / "audit.jsonl").write_text("{}")
    subprocess.run([FLWR, "build"], cwd=folder, check=True, capture_output=True)
    (app,) = folder.glob("*.fab")
    content = {name for name in ZipFile(app).namelist() if not name.startswith(".info/")}
    assert content == {"pyproject.toml", *(f"ward_nine/{name}.py" for name in ("__init__", "client", "server", "task"))}
