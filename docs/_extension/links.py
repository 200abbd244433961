"""Links: those of a page that lead out of docs/ are rewritten, and those of the built site are checked."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.util import logging

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "THIRD_PARTY.md": "third-party.md",
    "examples/gallery": "examples.md",
    "examples/notebooks": "first-steps.md",
    "examples/notebooks/compare_on_your_data.ipynb": "compare-your-data.md",
    "examples/notebooks/to_a_federation.ipynb": "to-a-federation.md",
    "results": "reproduction.md",
    "results/paper": "reproduction.md",
}
"""Files and folders outside docs/ that have a page of the site; other files are offered as downloads."""
NAMED = re.compile(r"(?<=\[)[\w-]+\.md(?=\]\(([^)#\s]+))")
"""The text of a link that is the name of a file: the site shows the title of the page."""
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(?=\))")
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)"[^>]*>\s*<img src="([^"]+)" alt="([^"]+)">\s*</picture>'
)
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def rewrite(text: str, folder: str, page: str) -> str:
    """Return the text of a file in a folder of the repository with the links that it needs as a page of docs/."""
    base = normpath(f"docs/{page}/..")

    def titled(match: re.Match[str]) -> str:
        return title((ROOT / normpath(f"{folder}/{match[1]}")).read_text(encoding="utf-8"))

    def target(match: re.Match[str]) -> str:
        path = normpath(f"{folder}/{match[1]}")
        path = f"docs/{PAGES[path]}" if path in PAGES else path
        return relpath(path, base) + (match[2] or "")

    text = PICTURE.sub(
        lambda match: f"![{match[3]}]({match[2]}){{.only-light}}\n![{match[3]}]({match[1]}){{.only-dark}}", text
    )
    return outside_code(text, lambda prose: LINK.sub(target, NAMED.sub(titled, prose)))


def title(text: str) -> str:
    """Return the title of a page."""
    return text.partition("# ")[2].partition("\n")[0].replace("`", "")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return a text of which all but the code is changed."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


class _Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name, value in attrs if name in ("id", "name") and value}
        self.targets += [value for name in ("href", "src") if (value := values.get(name))]


def check(app: Any, exception: Exception | None) -> None:
    """Warn of each link of the built pages that leads to a file or an anchor that does not exist."""
    if exception is not None or app.builder.name != "html":
        return
    out = Path(app.outdir)
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in out.rglob("*.html")}
    for path, page in pages.items():
        for target in page.targets:
            for problem in _problems(path, target, pages):
                log.warning("%s links to %s: %s", path.relative_to(out), target, problem)


def _problems(path: Path, target: str, pages: dict[Path, _Page]) -> list[str]:
    url = urlsplit(target)
    if url.scheme or url.netloc:
        return []
    linked = (path.parent / unquote(url.path)).resolve() if url.path else path
    if not linked.is_file():
        return ["no such file"]
    if url.fragment and linked in pages and unquote(url.fragment) not in pages[linked].anchors:
        return ["no such anchor"]
    return []
