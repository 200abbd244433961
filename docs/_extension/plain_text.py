"""The site as plain text, for coding assistants and for reading without a browser.

llms.txt lists the pages with a sentence on each, llms-full.txt contains all of them, and NAME.md is the Markdown of
NAME.html. Their links lead to such files, and to the pictures and downloads of the site.
"""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from _extension import links

TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
FIRST = 160
"""Most characters of the sentence on a page."""
INTRODUCTION = """# Keel

> Federated learning that does not drift: generalized heavy-ball momentum (GHBM, LocalGHBM, FedHBM) and the methods it
> is compared with, as a Python library and the command `keel`, on PyTorch.

Distribution `keel-fl`, import `keel`, command `keel`. [llms-full.txt](llms-full.txt) has all pages in one file.
"""
HIDDEN = re.compile(r"^```\{toctree\}\n(?:.*\n)*?```\n|^<!--.*-->\n|^</?(?:figure|svg|div|style)\b.*\n", re.MULTILINE)
"""What a reader of plain text does not need: tables of contents, comments, drawings."""
FIGURE = re.compile(r"^<figure\b.*?<figcaption>(.*?)</figcaption></figure>$", re.MULTILINE)
"""A computed figure in one line, of which the caption stays."""
TAG = re.compile(r"</?\w[^>]*>")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def keep(env: Any, name: str, text: str) -> None:
    """Remember the text of a page until all pages are written."""
    if not hasattr(env, "keel_pages"):
        env.keel_pages = {}
    env.keel_pages[name] = without_drawings(text)


def without_drawings(text: str) -> str:
    """Return the text of a page without drawings; the caption of a figure stays."""
    return HIDDEN.sub("", FIGURE.sub(lambda figure: f"Figure: {TAG.sub('', figure[1])}", text))


def write(app: Any, exception: Exception | None) -> None:
    """Write the plain-text files next to the built pages."""
    if exception is not None or app.builder.name != "html":
        return
    out = Path(app.outdir)
    pages = {name: app.env.keel_pages[name] for name in _order(app.env)}
    files = _files(app.env)
    for name, text in pages.items():
        (out / f"{name}.md").write_text(relinked(text, dirname(name), dirname(name), files), encoding="utf-8")
    entries = [f"- [{title(text)}]({name}.md): {sentence(text)}" for name, text in pages.items()]
    (out / "llms.txt").write_text("\n".join([INTRODUCTION, "## Pages", "", *entries, ""]), encoding="utf-8")
    texts = [
        f"<!-- {name}.md -->\n\n{relinked(text, dirname(name), '', files).strip()}\n" for name, text in pages.items()
    ]
    (out / "llms-full.txt").write_text("\n\n".join([INTRODUCTION, *texts]), encoding="utf-8")


def relinked(text: str, folder: str, new: str, files: dict[str, str]) -> str:
    """Return a text in another folder of the site, with links to the same targets.

    Args:
        text: The Markdown of a page.
        folder: The folder of the page, relative to docs/.
        new: The folder that the text is written to, relative to the site.
        files: Where the site has the files that are not pages, by their path relative to docs/.
    """

    def target(link: re.Match[str]) -> str:
        path = normpath(f"{folder or '.'}/{link[1]}")
        return relpath(files.get(path, path), new or ".") + (link[2] or "")

    return links.outside_code(text, lambda prose: links.LINK.sub(target, prose))


def _files(env: Any) -> dict[str, str]:
    """Return where Sphinx writes pictures and downloads, by their path relative to docs/."""
    pictures = {path: f"_images/{name}" for path, (_, name) in env.images.items()}
    return pictures | {normpath(path): f"_downloads/{name}" for path, (_, name) in env.dlfiles.items()}


def _order(env: Any) -> list[str]:
    """Return the names of the pages in the order of the table of contents."""
    names: list[str] = []

    def visit(name: str) -> None:
        if name not in names:
            names.append(name)
            for child in env.toctree_includes.get(name, []):
                visit(child)

    visit(env.config.root_doc)
    return names


def title(text: str) -> str:
    found = TITLE.search(text)
    assert found is not None, text[:200]
    return found[1].replace("`", "")


def sentence(text: str) -> str:
    """Return the first sentence of a page below its title, without markup."""
    body = CODE.sub("", text[TITLE.search(text).end() :])  # type: ignore[union-attr]
    paragraphs = [part for part in body.split("\n\n") if re.match(r"\s*(?!\[!)[\w`\"*\[]", part)]  # no badges
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join((paragraphs or [""])[0].split()))
    first = re.split(r"(?<=[.!?:])\s", plain, maxsplit=1)[0]
    return first if len(first) <= FIRST else first[: FIRST - 1].rsplit(" ", 1)[0] + " …"
