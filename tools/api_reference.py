"""Write docs/api.md, the reference of the public names of `keel`, from their docstrings.

    python tools/api_reference.py

The order of the names and their headings are those of src/keel/__init__.py. Text that belongs to a name is its
docstring; that of an attribute is the string below it.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import keel

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
WIDTH = 100
"""Signatures that are longer have one parameter per line."""
SECTION = re.compile(r"^(Args|Returns|Raises):\n((?:    .*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\S[^:\n]*): (.*(?:\n {5,}\S.*)*)", re.MULTILINE)
INTRODUCTION = """# API reference

<!-- Written by tools/api_reference.py from the docstrings. -->

`import keel` has every name on this page. The fields of a spec are on [their own page](spec.md). The pages on
[comparisons](compare.md), [sweeps](sweep.md), [data](data.md), [models](models.md), [observers](observers.md) and
[reports](report.md) have examples.
"""


def page() -> str:
    """Return the content of the page."""
    parts = [INTRODUCTION]
    for heading, names in headings():
        parts.append(f"## {heading}\n")
        parts += [entry(name) for name in names]
    return "\n".join(parts)


def headings() -> list[tuple[str, list[str]]]:
    """Return the groups of public names: the comments in the table of keel/__init__.py with the names below them."""
    table = re.search(r"_HOMES = \{\n(.*?)\n\}", inspect.getsource(keel), re.DOTALL)
    assert table is not None
    groups: list[tuple[str, list[str]]] = []
    for line in table[1].splitlines():
        if comment := re.match(r"    # (.*)", line):
            groups.append((comment[1].capitalize(), []))
        elif name := re.match(r'    "(\w+)"', line):
            groups[-1][1].append(name[1])
    return groups


def entry(name: str) -> str:
    """Return the section of a public name."""
    value = getattr(import_module(keel._HOMES[name]), name)
    node = ast.parse(dedent(inspect.getsource(value))).body[0]
    if isinstance(node, ast.FunctionDef):
        return "\n".join([f"### `keel.{name}`\n", signature(node, f"keel.{name}"), documented(node)])
    assert isinstance(node, ast.ClassDef)
    return "\n".join([f"### `keel.{name}`\n", documented(node), *members(node)])


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes of a class as a table, then its methods."""
    attributes = list(attributes_of(node))
    if attributes:
        rows = [f"| `{name}` | {code(kind)} | {' '.join(text.split())} |" for name, kind, text in attributes]
        yield "\n".join(["| attribute | type | meaning |", "|---|---|---|", *rows, ""])
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and not is_property(item):
            item.args.args = item.args.args[1:]  # without self
            yield signature(item, f"{node.name}.{item.name}")
            yield documented(item)


def attributes_of(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type and the text of each public field and property of a class."""
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name, kind, text = item.target.id, ast.unparse(item.annotation), ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = str(following.value.value)
        elif isinstance(item, ast.FunctionDef) and is_property(item):
            name, kind = item.name, ast.unparse(item.returns) if item.returns else ""
            text = ast.get_docstring(item) or ""
        else:
            continue
        if not name.startswith("_"):
            yield name, kind, text.replace("|", r"\|")


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) in ("property", "cached_property") for decorator in node.decorator_list)


def signature(node: ast.FunctionDef, name: str) -> str:
    """Return the signature as a block of text."""
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    parts = list(parameters(node.args))
    text = f"{name}({', '.join(parts)}){returned}"
    if len(text) > WIDTH:
        lines = "".join(f"    {part},\n" for part in parts)
        text = f"{name}(\n{lines}){returned}"
    return f"```text\n{unquoted(text)}\n```\n"


def unquoted(text: str) -> str:
    """Return annotations without the quotes that delay their evaluation."""
    return re.sub(r"(: |-> )'([\w.]+)'", r"\1\2", text)


def parameters(arguments: ast.arguments) -> Iterator[str]:
    """Yield the parameters one by one."""
    defaults: list[Any] = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    yield from (parameter(each, default) for each, default in zip(arguments.args, defaults, strict=True))
    if arguments.kwonlyargs:
        yield "*" if arguments.vararg is None else f"*{ast.unparse(arguments.vararg)}"
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from (parameter(each, default) for each, default in pairs)


def parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def documented(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return a docstring as Markdown: its sections become lists."""
    text = ast.get_docstring(node)
    assert text, f"{node.name} has no docstring"
    return SECTION.sub(lambda match: section(match[1], match[2]) + "\n", text + "\n").rstrip() + "\n"


def section(title: str, content: str) -> str:
    entries = ENTRY.findall(content)
    if title == "Returns" or not entries:
        return f"{title}: {' '.join(content.split())}\n"
    names = [re.sub(r"\w+", lambda word: f"`{word[0]}`", name) for name, _ in entries]
    lines = [f"- {name}: {' '.join(text.split())}" for name, (_, text) in zip(names, entries, strict=True)]
    return "\n".join([{"Args": "Arguments:", "Raises": "Raises:"}[title], "", *lines, ""])


def code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|") if text else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
