"""The HTML of a run and of a comparison in a notebook."""

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import keel
from keel.report.comparison import Comparison, compare
from keel.runs.folder import RunFolder

SHORT = {"rounds": 6, "evaluation": {"every": 2, "last": 1}}
HOSTILE = '</text></svg><script>alert(1)</script>" onload="alert(1)'


class Parsed(HTMLParser):
    """The elements of a page, their attributes and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> keel.Run:
    return keel.run({**SHORT, "algorithm": {"name": "fedavg"}}, out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def comparison(run: keel.Run, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    other = keel.run({**SHORT, "algorithm": {"name": "ghbm"}}, out=tmp_path_factory.mktemp("runs") / "run")
    return compare([RunFolder(run.path), RunFolder(other.path)])


def test_a_run_has_a_curve_and_a_row_of_numbers(run: keel.Run) -> None:
    page = run._repr_html_()
    parsed = Parsed(page)
    chart = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    lines = [e for e in chart.iter() if e.get("aria-roledescription") == "line mark"]
    assert len(lines) == 1
    assert run.accuracy is not None
    assert {"FedAvg", "finished", f"{100 * run.accuracy:.1f} %", str(run.path)} <= set(parsed.text)


def test_a_comparison_has_a_curve_and_a_row_for_each_method(comparison: Comparison) -> None:
    page = comparison._repr_html_()
    assert page.count('aria-roledescription="line mark"') == 2
    assert Parsed(page).tags.count("tr") == 3


def test_the_html_requires_no_network_and_takes_the_colour_of_the_notebook(comparison: Comparison) -> None:
    page = comparison._repr_html_()
    assert not {"script", "link", "img", "iframe"} & set(Parsed(page).tags)
    assert not {"src", "href", "xlink:href"} & Parsed(page).attributes
    assert 'fill="currentColor"' in page
    assert not any(f'fill="{colour}"' in page for colour in ("#000", "#000000", "black", "white", "#fff"))


def test_hostile_names_stay_text(comparison: Comparison, run: keel.Run, tmp_path: Path) -> None:
    safe = set(Parsed(comparison._repr_html_()).tags)
    hostile = compare([RunFolder(run.path)])
    object.__setattr__(hostile.methods[0], "label", HOSTILE)
    parsed = Parsed(hostile._repr_html_())
    assert set(parsed.tags) <= safe
    assert "onload" not in parsed.attributes
    assert HOSTILE in parsed.text

    path = tmp_path / "<img src=x onerror=alert(1)>"
    moved = keel.Run(run.path.rename(path), run.summary, run.module)
    assert set(Parsed(moved._repr_html_()).tags) <= safe
    path.rename(run.path)


def test_a_run_without_accuracy_has_a_curve_of_its_loss(tmp_path: Path) -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    sums = keel.Examples(inputs, inputs.sum(1))
    data = keel.FederatedData("sums", sums, sums, keel.Partition.of(np.split(np.arange(40), 4)), 0)

    def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - targets) ** 2

    run = keel.run(SHORT, model=nn.Linear(3, 1), data=data, loss=squared, out=tmp_path / "run")
    parsed = Parsed(run._repr_html_())
    assert parsed.tags.count("svg") == 1
    assert {"finished", "test loss", "last test loss"} <= set(parsed.text)
    assert "accuracy" not in parsed.text
