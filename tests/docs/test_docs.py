"""Every command and code block of the documents runs, and their lists and tables agree with the code."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest

import keel as public
from keel import make_spec
from keel.algorithms import REGISTRY
from keel.config.defaults import defaults
from keel.config.schema import Spec
from keel.runs.search_space import make_plan
from tests.conftest import Called

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = ("make ", ". .venv/")
"""Commands that are not run here: make runs these tests."""
ROUNDS = re.compile(r"(?<=--rounds )\d+")
MOST_ROUNDS = 10
"""A command runs with at most so many rounds: no result of it is tested."""
FILE = re.compile(r"# (\w+\.py)\n")
"""The first line of a Python block that is the content of a file."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_runs(document: Path, keel: Callable[..., Called], tmp_path: Path, in_process: None) -> None:
    """Python blocks and keel commands run in this process, which has imported PyTorch already.

    A Python block that starts with the name of a file is written to it; the commands after it use the file.
    """
    for language, block in BLOCK.findall(document.read_text()):
        if language == "sh":
            for line in block.splitlines():
                shortened = ROUNDS.sub(lambda rounds: str(min(int(rounds[0]), MOST_ROUNDS)), line)
                words = shlex.split(shortened, comments=True)
                if words and not line.startswith(ELSEWHERE):
                    if words[0] == "keel":
                        called = keel(*words[1:])
                        assert called.code == 0, (line, called.err)
                    else:
                        words = [sys.executable, "-m", *words] if words[0] == "pytest" else words
                        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
                        assert ended.returncode == 0, (line, ended.stdout, ended.stderr)
        elif language == "toml":
            table = tomllib.loads(block)
            _ = make_plan(table) if "search" in table else make_spec(table)
        elif language == "python" and (file := FILE.match(block)):
            (tmp_path / file[1]).write_text(block)
        elif language == "python":
            exec(compile(block, document.name, "exec"), {"__name__": "__main__"})  # noqa: S102
        else:
            assert language == "text", f"{document.name}: blocks of the language {language!r} are not tested"


def test_links_between_documents_have_targets() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            assert target.startswith("http") or (document.parent / target).exists(), (document.name, target)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
def test_the_example_of_adapters_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_process: None
) -> None:
    pytest.importorskip("peft", reason="requires the extra 'lora'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lora.py", "--quick"])
    run_path(str(ROOT / "examples/lora.py"), run_name="__main__")
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    factors = {"fedavg": 1.0, "ghbm": 1.5}
    assert [row[:2] for row in table[2:]] == [[tuning, method] for tuning in ("LoRA", "full") for method in factors]
    for _, method, _, parameters, megabytes, _ in table[2:]:
        assert float(megabytes) == round(factors[method] * 8 * int(parameters.replace(",", "")) / 1e6, 3)


def test_the_spec_page_names_every_field() -> None:
    page = (ROOT / "docs" / "spec.md").read_text()
    for section, info in Spec.model_fields.items():
        for field in getattr(info.annotation, "model_fields", {}) or [section]:
            assert f"`{field}`" in page or f"[{field}]" in page, (section, field)


def test_the_features_page_names_every_algorithm() -> None:
    page = (ROOT / "docs" / "features.md").read_text()
    assert [name for name in REGISTRY if f"`{name}`" not in page] == []


def test_the_defaults_on_the_digits_are_the_best_points_of_the_grid() -> None:
    rows = [row for row in json.loads((ROOT / "results/digits_grid.json").read_text()) if row["best"]]
    assert {row["algorithm"] for row in rows} == set(defaults()["digits"]["with"]) == set(REGISTRY) - {"centralized"}
    for row in rows:
        spec = make_spec({"algorithm": {"name": row["algorithm"]}}).model_dump()
        for field, value in row.items():
            if "." in field:
                table, key = field.split(".")
                assert spec[table][key] == value, (row["algorithm"], field)


def test_every_algorithm_has_a_page_with_a_curve() -> None:
    for name in REGISTRY:
        assert f"](../images/algorithms/{name}.svg)" in (ROOT / f"docs/algorithms/{name}.md").read_text()


def test_the_curves_of_the_pages_are_the_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    curves = import_module("algorithm_curves")
    recorded = json.loads(curves.CURVES.read_text())
    assert list(recorded) == list(curves.TASKS)
    assert all(set(methods) == set(REGISTRY) for methods in recorded.values())
    for path, image in curves.images(["ghbm", "centralized"]).items():
        assert path.read_bytes() == image, "run python tools/algorithm_curves.py draw"


def test_the_choosing_page_has_the_recorded_accuracies_with_hyper_parameters_of_another_task() -> None:
    scarce = json.loads((ROOT / "results/algorithm_curves.json").read_text())["one class per client, C = 2 %"]
    [sentence] = re.findall(
        r"Over the last 100 of 400 rounds.*?sensitive", (ROOT / "docs/choosing.md").read_text(), re.DOTALL
    )
    stated = dict(re.findall(r"(\w+)(?: has|, with)? (\d+) %", " ".join(sentence.split())))
    assert set(stated) == {"GHBM", "FedAvg", "FedHBM", "FedCM", "FedSpeed", "FedExP"}
    for title, percent in stated.items():
        curve = scarce[title.lower()]
        late = [mean for round_, mean in zip(curve["rounds"], curve["mean"], strict=True) if round_ > 300]
        assert round(100 * sum(late) / len(late)) == int(percent), title


def test_every_algorithm_page_links_to_its_paper() -> None:
    without = [
        name for name in REGISTRY if "https://arxiv.org/abs/" not in (ROOT / f"docs/algorithms/{name}.md").read_text()
    ]
    assert sorted(without) == ["centralized", "fedadc", "ghbm_lookahead"]  # a reference; ISIT proceedings; Keel's own


def test_the_performance_page_shows_the_measured_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = import_module("page")
    text = page.PAGE.read_text()
    assert page.filled(text, json.loads(page.RESULTS.read_text())) == text


def test_the_api_reference_is_that_of_the_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    reference = import_module("api_reference")
    assert reference.page() == reference.PAGE.read_text(), "run python tools/api_reference.py"


def test_the_api_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in public.__all__ if f"### `keel.{name}`" not in page] == []
