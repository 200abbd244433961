"""The README is short, and its figure and its table are those of the recorded results and of real links."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 500


def test_the_readme_has_at_most_500_words() -> None:
    without_addresses = re.sub(r"<[^>]*>", "", re.sub(r"\]\([^)]*\)", "]", TEXT))
    assert len(without_addresses.split()) <= MOST_WORDS


def test_the_readme_has_the_two_commands() -> None:
    assert "\nmake demo " in TEXT
    assert "\nmake test " in TEXT


def test_every_tick_of_the_comparison_has_a_link() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    ticks = sum(row.count("✓") for row in rows)
    assert ticks == sum(len(re.findall(r"\[✓\]\((?:https://|docs/)[^)]+\)", row)) for row in rows) > 15


def test_the_model_of_the_user_takes_twelve_lines() -> None:
    [block] = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 12


def test_the_figure_shows_the_recorded_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    figure = import_module("readme_figure")
    [alt] = re.findall(r'alt="([^"]+)"', TEXT)
    others = re.findall(r"(SCAFFOLD|FedACG with full lookahead) \(([\d.]+) %\)", " ".join(TEXT.split()))
    assert len(others) == 2
    for label, accuracy in others:
        [row] = figure.rows([label.replace("with full lookahead", "lookahead=full")])
        assert f"{100 * row['accuracy_mean']:.1f}" == accuracy
    for row in figure.rows(figure.METHODS):
        accuracy = f"{100 * row['accuracy_mean']:.1f} %"
        assert f"{row['label']} {accuracy}" in alt
        for theme in figure.THEMES:
            assert accuracy in (figure.IMAGES / f"drift-{theme}.svg").read_text(), "run python tools/readme_figure.py"


def test_the_badges_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    for path, content in import_module("badges").badges().items():
        assert path.read_text(encoding="utf-8") == content, "run python tools/badges.py"
        assert f"]({path.relative_to(ROOT).as_posix()})](" in TEXT
