"""The site builds without a warning, and shows what the code says. It is built once, as `make docs` builds it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from keel.algorithms import REGISTRY
from keel.cli import app
from keel.config.schema import Spec

pytest.importorskip("sphinx", reason="requires the extra 'docs'")
pytest.importorskip("myst_parser", reason="requires the extra 'docs'")
pytest.importorskip("furo", reason="requires the extra 'docs'")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
GALLERY = sorted((ROOT / "examples" / "gallery").glob("*.py"))
OUTPUT = re.compile(r"/(\w+)\.py\) prints:\n\n```text\n(.*?)\n```", re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-E",
        "-b",
        "html",
        "docs",
        str(out / "html"),
    ]
    environment = {**os.environ, "KEEL_DATA": str(out / "data")}
    command += ["-d", str(out / "doctrees")]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return out / "html"


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("_extension.links")


def test_every_example_of_the_gallery_is_shown_with_what_it_has_learned(site: Path) -> None:
    outputs = dict(OUTPUT.findall((site / "examples.md").read_text()))
    assert sorted(outputs) == [path.stem for path in GALLERY]
    for name, output in outputs.items():
        results = [float(number) / (100 if "%" in output else 1) for number in re.findall(r"\d+\.\d+", output)]
        assert max(results) > 0.6, name


def test_the_example_of_a_million_phones_announces_the_footprint_of_client_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_process: None
) -> None:
    """The site runs it with a million phones; here with 2,000, of which half are for testing."""
    monkeypatch.chdir(tmp_path)
    code = (ROOT / "examples/gallery/million_phones.py").read_text()
    for whole, small in (("PHONES, COHORT = 1_000_000", "PHONES, COHORT = 2_000"), ('"rounds": 100', '"rounds": 10')):
        assert whole in code
        code = code.replace(whole, small)
    exec(compile(code, "million_phones.py", "exec"), {"__name__": "__main__"})  # noqa: S102
    announced = {line.partition(":")[0]: line for line in capsys.readouterr().out.splitlines() if ": up to" in line}
    assert list(announced) == ["FedAvg", "GHBM", "FedHBM"]
    assert "100 clients with 7.0 kB of state each" in announced["FedHBM"]
    assert "of state" not in announced["FedAvg"] + announced["GHBM"]


def test_the_examples_are_short() -> None:
    assert [path.name for path in GALLERY if len(path.read_text().splitlines()) > 30] == []


def test_every_page_is_in_the_plain_text(site: Path) -> None:
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    listed = re.findall(r"^- \[.+\]\((.+)\): \S", (site / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(listed) == pages
    assert "- [Keel](index.md): Federated learning that does not drift.\n" in (site / "llms.txt").read_text()
    full = (site / "llms-full.txt").read_text()
    assert [page for page in pages if f"<!-- {page} -->\n\n# " not in full] == []
    assert [page for page in pages if not (site / page).is_file()] == []


def test_the_plain_text_has_the_captions_of_the_figures(site: Path) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", (site / "concepts.html").read_text())
    text = (site / "concepts.md").read_text()
    assert len(captions) == text.count("\nFigure: ") == 4
    assert "<svg" not in text


def test_a_page_that_begins_with_a_command_is_described_by_its_first_sentence(links: ModuleType) -> None:
    plain_text = import_module("_extension.plain_text")
    assert plain_text.sentence("# Title\n\n```sh\nkeel report\n```\n\nWrites a page. More.\n") == "Writes a page."
    drawing = (
        '<figure class="computed"><svg><text>7</text></svg><figcaption>The <em>drift</em>.</figcaption></figure>\n'
    )
    assert plain_text.without_drawings(drawing) == "Figure: The drift.\n"


def test_the_links_of_the_plain_text_have_targets(site: Path, links: ModuleType) -> None:
    targets: list[tuple[Path, str]] = []

    def collect(prose: str) -> str:
        targets.extend((path, link[1]) for link in links.LINK.finditer(prose))
        return prose

    for path in [*site.rglob("*.md"), site / "llms.txt", site / "llms-full.txt"]:
        links.outside_code(path.read_text(), collect)
    assert len(targets) > 1000
    assert [f"{path.name}: {target}" for path, target in targets if not (path.parent / target).is_file()] == []


def test_the_commands_page_has_every_command(site: Path) -> None:
    page = (site / "commands.md").read_text()
    names = list(commands(typer.main.get_command(app), "keel"))
    assert len(names) > 20
    assert [name for name in names if f"# `{name}`\n" not in page or f"Usage: {name} " not in page] == []


def commands(command: Any, path: str) -> Iterator[str]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


def test_the_fields_page_has_every_field(site: Path) -> None:
    page = (site / "fields.md").read_text()
    for table in ("data", "local", "participation", "evaluation", "engine"):
        for field in Spec.model_fields[table].annotation.model_fields:  # type: ignore[union-attr]
            assert f"| `{table}.{field}` |" in page
    for row in ("| `local.lr` | number; above 0 | `0.1` |", "| `stop.patience` | integer (at least 1) | none |"):
        assert row in page
    assert "| `algorithm.tau` |" in page


def test_the_messages_page_has_every_algorithm(site: Path) -> None:
    page = (site / "messages.md").read_text()
    assert [name for name in REGISTRY if name != "centralized" and f"(algorithms/{name}.md)" not in page] == []
    assert "| [GHBM](algorithms/ghbm.md) | `theta`, `m` | `delta` |" in page
    assert "| [FedHBM](algorithms/fedhbm.md) | `theta` | `delta` |" in page


def test_the_concepts_page_has_its_figures(site: Path) -> None:
    page = (site / "concepts.html").read_text().replace("\u00a0", " ")
    assert page.count('<figure class="computed"><svg') == 4
    accuracies = [float(number) for number in re.findall(r"([\d.]+)% with tau = ", page)]
    assert max(accuracies) > 90, accuracies


def test_the_choosing_page_has_the_recorded_results(site: Path) -> None:
    page = (site / "choosing.md").read_text().replace("\u00a0", " ")
    assert "| FedHBM | 96.6 ± 0.6 | 97.4 ± 0.4 |" in page


def test_no_page_names_a_folder_of_this_machine(site: Path) -> None:
    folders = [str(ROOT), str(Path.home()) + "/", "/tmp/", sys.prefix]
    for path in [*site.rglob("*.html"), *site.rglob("*.md"), *site.rglob("*.txt")]:
        assert [folder for folder in folders if folder in path.read_text()] == [], path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output_and_shown_with_it(site: Path, path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    [page] = [page for page in site.glob("*.md") if f"{path.stem}.ipynb)." in page.read_text()]
    assert page.read_text().count("```python") == len(code)
    assert "```text" in page.read_text()


def test_there_are_three_notebooks() -> None:
    assert len(NOTEBOOKS) == 3


def test_the_model_of_the_federation_has_learned(site: Path) -> None:
    [accuracy] = re.findall(r"^accuracy ([\d.]+)$", (site / "to-a-federation.md").read_text(), re.MULTILINE)
    assert float(accuracy) > 0.8


def test_links_out_of_the_pages_are_rewritten(links: ModuleType) -> None:
    text = "[a](../README.md) [b](data.md#x) [c](https://a.b/c.md) [d](../results/x.json) [e](../CONTRIBUTING.md#map)"
    expected = "[a](index.md) [b](data.md#x) [c](https://a.b/c.md) [d](../results/x.json) [e](contributing.md#map)"
    assert links.rewrite(text, "docs", "page") == expected
    assert links.rewrite("[a](../data.md)", "docs/algorithms", "algorithms/ghbm") == "[a](../data.md)"
    assert links.rewrite("see [data.md](data.md#partitions)", "docs", "page") == "see [Data](data.md#partitions)"
    assert links.rewrite("[a](docs/data.md) [b](LICENSE)", ".", "index") == "[a](data.md) [b](../LICENSE)"
    assert links.rewrite("```text\n[a](../README.md)\n```", "docs", "page") == "```text\n[a](../README.md)\n```"


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("other.html", []),
        ("other.html#here", []),
        ("https://example.org/x", []),
        ("other.html#there", ["no such anchor"]),
        ("none.html", ["no such file"]),
    ],
)
def test_broken_links_of_the_built_site_are_reported(
    links: ModuleType, tmp_path: Path, target: str, problem: list[str]
) -> None:
    texts = {"page.html": f"<a href='{target}'>x</a>", "other.html": "<h1 id='here'>x</h1>"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    pages = {tmp_path / name: links._Page(text) for name, text in texts.items()}
    assert links._problems(tmp_path / "page.html", target, pages) == problem
