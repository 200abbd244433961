"""Fault injection: programs that break Keel on purpose and check that nothing is lost or silently wrong.

A kind of fault is a module of this package with one function,

    check(seed: int, folder: Path) -> str | None

which runs the case that the seed determines in an empty folder, and returns None if Keel behaved, or one line that says
what it did instead. An exception that `check` does not catch counts as a failure as well. What cases share is built
once and cached by the module.
"""
