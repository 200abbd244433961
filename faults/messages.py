"""Messages between the server and the sites of a federation: damaged replies at the server, damaged requests at a site.

The server drops an invalid reply; a site refuses an invalid request with a code and the class of a KeelError. No other
exception leaves the validators, nothing is unpickled, and what is accepted is finite and has the declared shapes.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from faults._audit import watched
from faults._federation import answers, describe, evaluate, mod, strategy, train
from faults._message_damage import damaged_content

SIDES = {train: 60, evaluate: 60, describe: 60, strategy: 40, mod: 30, answers: 1}
"""What handles a message, and how often it is drawn; a site that answers is slow, because it trains."""


@contextmanager
def silent() -> Iterator[None]:
    """Keep Flower's logger, which logs every refusal, silent."""
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def check(seed: int, folder: Path) -> str | None:
    rng = Random(seed)
    [side] = rng.choices(list(SIDES), list(SIDES.values()))
    with silent(), watched(folder) as violations:
        problem = side(folder, rng, lambda content: damaged_content(rng, content))
    problem = problem or next(iter(violations), None)
    return None if problem is None else f"{side.__name__}: {problem}"
