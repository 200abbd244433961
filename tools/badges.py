"""Draw the badges of the README, docs/images/badges, from pyproject.toml.

python tools/badges.py
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images" / "badges"
LETTER, MARGIN, HEIGHT = 6.6, 8, 20
"""The width of a letter on average, the space around a text, and the height of a badge, in pixels."""
BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">
<title>{name} {text}</title>
<rect width="{width}" height="{height}" rx="3" fill="#555"/>
<path d="M{left} 0h{inner}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{inner}z" fill="#00558c"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{middle_left}" y="14">{name}</text><text x="{middle_right}" y="14">{text}</text>
</g></svg>
"""


def badge(name: str, text: str) -> str:
    """Return a badge as SVG."""
    left, right = (round(LETTER * len(part) + 2 * MARGIN) for part in (name, text))
    return BADGE.format(
        width=left + right,
        height=HEIGHT,
        left=left,
        inner=right - 3,
        middle_left=left / 2,
        middle_right=left + right / 2,
        name=name,
        text=text,
    )


def badges() -> dict[Path, str]:
    """Return the files with their content."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [
        c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    ]
    texts = {
        "version": project["version"],
        "python": f"{versions[0]} – {versions[-1]}",
        "licence": project["license"].replace("-", " "),
    }
    return {FOLDER / f"{name}.svg": badge(name, text) for name, text in texts.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, content in badges().items():
        path.write_text(content, encoding="utf-8")
