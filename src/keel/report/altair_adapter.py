"""Altair, also under `python -OO`: it cannot be imported without its docstrings, which -OO removes."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


class _WithDocstrings(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)


class _AltairFinder:
    """Finds the modules of Altair, and loads them with their docstrings."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "altair":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _WithDocstrings(spec.loader.name, spec.loader.path)
        return spec


if sys.flags.optimize > 1:
    sys.meta_path.insert(0, _AltairFinder)

import altair as alt  # noqa: E402

__all__ = ["alt"]
