"""Running the code of examples and notebooks, in a temporary folder, and keeping what it shows."""

import ast
import io
import re
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

LIMIT = 60.0
"""The most seconds of processor time that an example or a notebook may take."""


@contextmanager
def empty_folder() -> Iterator[None]:
    """Work in an empty folder, which is removed."""
    with TemporaryDirectory(prefix="keel-site-") as folder, chdir(folder):
        yield


class Session:
    """A module that runs one block of code after the other, as a notebook does."""

    def __init__(self, name: str):
        self.module = ModuleType("__main__")
        self.name = name
        self.seconds = 0.0

    def run(self, code: str) -> tuple[str, Any]:
        """Run a block, and return what it prints and the value of its last line, if that is an expression."""
        tree, start = ast.parse(code), time.process_time()
        last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        printed, value, main = io.StringIO(), None, sys.modules["__main__"]
        sys.modules["__main__"] = self.module
        try:
            with redirect_stdout(printed), redirect_stderr(io.StringIO()):
                exec(compile(tree, self.name, "exec"), vars(self.module))  # noqa: S102
                if last is not None:
                    value = eval(compile(ast.Expression(last), self.name, "eval"), vars(self.module))  # noqa: S307
        finally:
            sys.modules["__main__"] = main
        self.seconds += time.process_time() - start
        if self.seconds > LIMIT:
            raise RuntimeError(f"{self.name} takes more than {LIMIT:.0f} s")
        return without_paths(printed.getvalue()), value


def without_paths(text: str) -> str:
    """Return a text without the folders of this machine."""
    return re.sub(r"(?:/[\w.-]+)*/keel-site-\w+/", "", text).replace(sys.prefix, "VENV").rstrip()
