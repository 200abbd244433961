"""What --dry-run prints."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from keel.commands.options import print_json

if TYPE_CHECKING:
    from keel.runs.spec import Spec


def print_price(specs: list["Spec"], as_json: bool) -> None:
    """What runs would take together; those that differ in the seed alone are measured once."""
    from shutil import disk_usage

    from keel.runs.price import price
    from keel.terminal import console, print_table
    from keel.units import duration, size

    groups: dict[str, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(spec.model_copy(update={"seed": 0}).to_toml(), []).append(spec)
    prices = [(group, price(group[0])) for group in groups.values()]
    if as_json:
        print_json([{"label": group[0].label, "runs": len(group), **asdict(found)} for group, found in prices])
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("each run of", overflow="fold")
    networked = any(spec.network is not None for spec in specs)
    for name in ("rounds", "bytes", "disk", "RAM", "time here", *(["federation"] if networked else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for group, found in prices:
        figures = [f"{found.rounds:,}", size(found.bytes), size(found.disk), size(found.ram), duration(found.seconds)]
        figures += [duration(found.federation_seconds)] if found.federation_seconds is not None else []
        table.add_row(group[0].algorithm.title, *figures)
    print_table(table)
    seconds = sum(len(group) * found.seconds for group, found in prices)
    disk = sum(len(group) * found.disk for group, found in prices)
    runs = f"{len(specs)} run" + "s" * (len(specs) > 1)
    free = disk_usage(".").free
    console.print(
        f"\n{runs}: about {duration(seconds)} of computing on this machine, up to {size(disk)} on disk. "
        "RAM: besides the program and the data."
    )
    if disk > free:
        console.print(f"This does not fit: the disk has {size(free)} left.")
