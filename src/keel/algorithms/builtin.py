"""The algorithms of this folder by name.

The names are read from the source, since importing the modules imports PyTorch.
"""

import ast
from collections.abc import Iterator, Mapping
from importlib.resources import files

from keel.algorithms.base import Algorithm
from keel.registry import Lazy


def _references() -> dict[str, str]:
    """Return the "module:class" of each class that has a text as its attribute `name`, sorted by name."""
    references = {}
    for file in files(__package__).iterdir():
        module, _, suffix = file.name.rpartition(".")
        if suffix == "py":
            for name, cls in _named_classes(file.read_text(encoding="utf-8")):
                references[name] = f"{__package__}.{module}:{cls}"
    return dict(sorted(references.items()))


def _named_classes(source: str) -> Iterator[tuple[str, str]]:
    """Yield the attribute `name` and the class of each class statement that has one."""
    for cls in [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]:
        for statement in cls.body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id="name")], value=ast.Constant(value=str(name)))
                    | ast.AnnAssign(target=ast.Name(id="name"), value=ast.Constant(value=str(name)))
                ):
                    yield name, cls.name


REGISTRY: Mapping[str, type[Algorithm]] = Lazy(_references())
