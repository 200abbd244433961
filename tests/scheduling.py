"""Which tests pytest-xdist gives to one worker, and which it starts first."""

import re

from xdist.scheduler import LoadFileScheduling

FIRST = ("tests/core/test_replay.py",)
"""Files that need a fresh process. A gradient is not replayed if anything else in the process draws random numbers, as
a thread that an earlier test has left there may do."""
LONGEST = (
    "tests/deploy/test_end_to_end.py",
    "tests/engines/test_ray.py",
    "tests/paper/test_results.py",
    "tests/cli/test_demo.py",
    "tests/runs/test_run.py",
    "tests/docs/test_site.py",
    "tests/deploy/test_perimeter.py",
    "tests/engines/test_ray_cluster.py",
    "tests/faults/test_faults.py",
    "tests/runs/test_sweep.py",
    "tests/report/test_page.py",
)
"""Files that take longest, longest first. They are started first, so that no worker ends long after the others."""
DIVISIBLE = ("tests/docs/test_docs.py", "tests/contract/test_contract.py")
"""Files whose tests share nothing expensive. They are shared by the workers: the documents early, the many short tests
of the contract last."""


def rank(file: str) -> int:
    """The position of a file in the order of execution. Files of equal rank stay in the order of collection."""
    order = (*FIRST, *LONGEST, DIVISIBLE[0], None, DIVISIBLE[1])
    return order.index(file if file in order else None)


class Scheduling(LoadFileScheduling):
    """One worker runs all tests of a file, which share fixtures; those of a divisible file by their first parameter.

    In the contract suite that is the algorithm, whose reference run the tests share.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file not in DIVISIBLE:
            return file
        parameter = re.search(r"\[([^-\]]*)", test)
        return f"{file}[{parameter[1]}]" if parameter else file
