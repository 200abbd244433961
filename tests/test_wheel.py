"""The wheel, installed into an empty environment, runs outside the source tree."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
Keel = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def site_packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone, which also finds the packages of this one: those that Keel requires."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    scheme = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    with ZipFile(wheel) as archive:  # a wheel without compiled files is installed by unpacking it
        archive.extractall(packages)
    found = [path for path in sys.path if "packages" in path]
    (packages / "required.pth").write_text("\n".join(found))  # a .pth file in those folders has no effect here
    return packages


@pytest.fixture
def keel(site_packages: Path, tmp_path: Path) -> Keel:
    python = next(site_packages.parents[2].glob("bin/python"), sys.executable)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "keel", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)

    return call


def test_it_has_the_files_of_the_source_tree_and_no_others(wheel: Path) -> None:
    sources = {path.relative_to(ROOT / "src") for path in (ROOT / "src/keel").rglob("*") if path.is_file()}
    expected = {path.as_posix() for path in sources if "__pycache__" not in path.parts}
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    licences = {name.partition("licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "THIRD_PARTY.md"}


def test_its_metadata_are_those_of_the_project(site_packages: Path) -> None:
    [folder] = site_packages.glob("keel_fl-*.dist-info")
    installed = PathDistribution(folder)
    assert (installed.name, installed.version) == (PROJECT["name"], PROJECT["version"])
    assert {entry.name: entry.value for entry in installed.entry_points if entry.group == "console_scripts"} == {
        "keel": "keel.cli:main"
    }
    assert {"3.11", "3.12", "3.13"} <= {c.rpartition(" ")[2] for c in installed.metadata.get_all("Classifier") or []}


def test_it_trains_and_reports_outside_the_tree(keel: Keel, tmp_path: Path, site_packages: Path) -> None:
    assert keel("--version").stdout == f"{PROJECT['version']}\n"
    ended = keel("run", "--algorithm", "ghbm", "--rounds", "3", "--out", "run", "--quiet", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["rounds"] == 3
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["keel"] == PROJECT["version"]
    python = site_packages.parents[2] / "bin/python"
    where = [str(python), "-c", "import keel; print(keel.__file__)"]
    imported = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(imported.strip()).is_relative_to(site_packages)
    ended = keel("report", "run")
    assert ended.returncode == 0, ended.stderr
    assert "vegaEmbed" in (tmp_path / "report.html").read_text()


def test_every_document_of_a_release_has_the_version() -> None:
    version = PROJECT["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"# Release notes: {version}\n" in (ROOT / f"docs/release-{version}.md").read_text()
