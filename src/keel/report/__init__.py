"""Tables, charts and pages on runs. The package is callable: `keel.report(runs)` writes a page.

`keel.report` is both this package and a function of the public API, `keel.report.report_page.report`: once a module of
the package is imported, Python binds the name to the package.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Write an HTML report on runs; see `keel.report.report_page.report`."""
        from keel.report.report_page import report

        return report(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
