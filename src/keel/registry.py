"""Finds what a spec names: something built in, an entry point of an installed package, or "module:name".

The entry-point groups are keel.algorithms, keel.data, keel.models, keel.samplers, keel.engines and keel.displays.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from keel.errors import KeelError, one_line, shown, unknown_name

T = TypeVar("T")


class Lazy(Mapping[str, T]):
    """Built-in objects by name, each a "module:name" that is imported when it is looked up.

    The names are available without an import: an unknown one is reported before PyTorch is imported.
    """

    def __init__(self, references: Mapping[str, str]):
        self.references = references

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self.references[name].partition(":")
        return getattr(import_module(module), attribute)

    def __contains__(self, name: object) -> bool:  # Mapping's default would import it
        return name in self.references

    def __iter__(self) -> Iterator[str]:
        return iter(self.references)

    def __len__(self) -> int:
        return len(self.references)


def find(field: str, name: str, builtin: Mapping[str, T], group: str) -> T:
    """The object called `name`.

    Args:
        field: The spec's field, which an error names.
        builtin: Built-in objects by name. They take precedence over entry points of the same name.
        group: The entry-point group in which packages register theirs.

    Raises:
        KeelError: Nothing has this name, or what has it cannot be imported.
    """
    check_name(field, name, builtin, group)
    if name in builtin:
        return builtin[name]
    if ":" in name:
        return imported(field, name)
    return _load(field, name, _registered(group)[name].load)


def check_name(field: str, name: str, builtin: Mapping[str, object], group: str) -> None:
    """Raise the KeelError of `find` if nothing has this name; nothing is imported."""
    if not known(name, builtin, group):
        raise unknown_name(field, name, [*builtin, *_registered(group)], "or module:name")


def known(name: str, builtin: Mapping[str, object], group: str) -> bool:
    """Whether `find` would look for it; nothing is imported."""
    return name in builtin or ":" in name or name in _registered(group)


def imported(field: str, reference: str) -> Any:
    """The object that "module:name" refers to. The working folder is searched too."""
    module, _, name = reference.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    return _load(field, reference, lambda: getattr(import_module(module), name))


def _load(field: str, name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (Exception, SystemExit) as error:  # the user's module may raise anything, and a script may exit
        raise KeelError(f"{field}: cannot import {shown(name)} ({one_line(error)})") from error


@cache
def _registered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
