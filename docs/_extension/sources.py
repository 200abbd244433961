"""The text of a page: its Markdown with every comment `<!-- site: NAME ARGUMENTS -->` replaced by what it names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _extension import commands, examples, fields, figures, ladder, links, messages, notebooks, plain_text

ROOT = Path(__file__).parents[2]
NO_BREAK = "\u00a0"
UNIT = re.compile(r"(?<=\d) (?=%|(?:[kMG]?B|m?s)\b)|(?<=\w) (?=[=±] -?\d)|(?<=[=±]) (?=-?\d)", re.ASCII)
"""The spaces around a number, before its unit or in "C = 2", at which a line does not break."""
LINE = re.compile(r"^(?!#).+$", re.MULTILINE)
COMMENT = re.compile(r"^<!-- site: (\w+)(?: (.+?))? -->$", re.MULTILINE)


def included(path: str) -> str:
    """Return a file of the repository, with its links rewritten for a page in docs/."""
    folder = str(Path(path).parent)
    return links.rewrite((ROOT / path).read_text(encoding="utf-8"), folder, "index")


def contents(pattern: str) -> str:
    """Return a table of contents that only the sidebar shows."""
    return f"```{{toctree}}\n:hidden:\n:glob:\n\n{pattern}\n```"


def unlisted() -> str:
    """Return the table of contents of the pages in docs/ that index.md does not name."""
    folder = ROOT / "docs"
    named = {"index", *re.findall(r"^([\w.-]+)$", (folder / "index.md").read_text(encoding="utf-8"), re.MULTILINE)}
    names = sorted({path.stem for path in folder.glob("*.md")} - named)
    return "\n".join(["```{toctree}", ":hidden:", ":caption: More", "", *names, "```"]) if names else ""


PARTS: dict[str, Callable[..., str]] = {
    "include": included,
    "contents": contents,
    "commands": commands.markdown,
    "example": examples.markdown,
    "fields": fields.markdown,
    "figure": figures.markdown,
    "ladder": ladder.markdown,
    "messages": messages.markdown,
    "notebook": notebooks.markdown,
    "unlisted": unlisted,
}


def expand(app: Any, name: str, source: list[str]) -> None:
    """Replace the comments and links of a page that Sphinx has read."""
    text = links.rewrite(source[0], str(Path("docs", name).parent), name)
    source[0] = COMMENT.sub(lambda comment: PARTS[comment[1]](*(comment[2] or "").split()), text)
    plain_text.keep(app.env, name, source[0])
    source[0] = links.outside_code(source[0], unbroken)


def unbroken(prose: str) -> str:
    """Return prose in which no line breaks at a number. Headings stay as they are: their anchors are made of them."""
    return LINE.sub(lambda line: UNIT.sub(NO_BREAK, line[0]), prose)
