"""Every third-party package that Keel imports is declared in pyproject.toml."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "keel"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = packages_distributions()
"""The installed distributions that provide each top-level module: `PIL` is provided by `pillow`."""


def test_every_imported_package_is_declared() -> None:
    requirements = [
        *PROJECT["dependencies"],
        *(r for extra in PROJECT["optional-dependencies"].values() for r in extra),
    ]
    assert _undeclared(SOURCES, requirements) == []


def test_keel_deploy_needs_no_extra_but_flower() -> None:
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["flower"]]
    assert _undeclared(SOURCES / "deploy", requirements) == []


def test_a_node_of_a_federation_starts_without_pytorch() -> None:
    """Only the processes that train need it; it takes a second and 150 MB."""
    pytest.importorskip("flwr", reason="requires the extra 'flower'")
    code = "import sys, keel.deploy.node; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_undeclared_import_is_reported(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def f():\n    import httpx, json\n    from keel import run\n")
    assert _undeclared(tmp_path, ["flwr>=1.41"]) == ["module.py: httpx"]
    assert _undeclared(tmp_path, ["HTTPX[http2]>=0.28"]) == []


def _undeclared(folder: Path, requirements: list[str]) -> list[str]:
    declared = {_normalise(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in requirements}
    return sorted(
        {
            f"{source.relative_to(folder)}: {module}"
            for source in folder.rglob("*.py")
            for module in _third_party_imports(source)
            if declared.isdisjoint(map(_normalise, DISTRIBUTIONS.get(module, [module])))
        }
    )


def _third_party_imports(source: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            module = name.partition(".")[0]
            if module != "keel" and module not in sys.stdlib_module_names:
                yield module


def _normalise(name: str) -> str:
    """Return a distribution's name in the form in which two spellings of it are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
