"""Call the command in this process from fixtures of any scope, where pytest's capsys is not available."""

import sys
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from keel.cli import main
from tests.conftest import Called


def call_keel(folder: Path, *arguments: str | Path) -> Called:
    """Call `keel` with these arguments from `folder`."""
    out, err, code = StringIO(), StringIO(), 0
    with ExitStack() as stack:
        stack.enter_context(chdir(folder))
        stack.enter_context(patch.object(sys, "argv", ["keel", *map(str, arguments)]))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Called(code, out.getvalue(), err.getvalue())
