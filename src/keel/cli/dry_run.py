"""The resource estimate that --dry-run prints."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from keel.cli.options import print_json

if TYPE_CHECKING:
    from keel.config.schema import Spec


def print_estimate(specs: list["Spec"], as_json: bool) -> None:
    """Print the resources that these runs need; runs that differ only in the seed are measured once."""
    from shutil import disk_usage

    from keel.cli.terminal import console, print_table
    from keel.runs.estimate import estimate as estimate_run
    from keel.units import duration, size

    groups: dict[str, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(spec.model_copy(update={"seed": 0}).to_toml(), []).append(spec)
    estimates = [(group, estimate_run(group[0])) for group in groups.values()]
    if as_json:
        print_json([{"label": group[0].label, "runs": len(group), **asdict(estimate)} for group, estimate in estimates])
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("method (per run)", overflow="fold")
    networked = any(spec.network is not None for spec in specs)
    for name in ("rounds", "bytes", "disk", "RAM", "wall-clock\ntime", *(["in the\nfederation"] if networked else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for group, estimate in estimates:
        figures = [
            f"{estimate.rounds:,}",
            size(estimate.bytes),
            size(estimate.disk),
            size(estimate.ram),
            duration(estimate.seconds),
        ]
        figures += [duration(estimate.federation_seconds)] if estimate.federation_seconds is not None else []
        table.add_row(group[0].algorithm.title, *figures)
    print_table(table)
    for group, estimate in estimates:
        if estimate.noise is not None:
            schedule = ", ".join(f"{epsilon:.3g} (round {t})" for t, epsilon in estimate.epsilon)
            console.print(f"\n{group[0].algorithm.title}: noise multiplier {estimate.noise:.4g}; epsilon {schedule}")
    seconds = sum(len(group) * estimate.seconds for group, estimate in estimates)
    disk = sum(len(group) * estimate.disk for group, estimate in estimates)
    runs = f"{len(specs)} run" + "s" * (len(specs) > 1)
    free = disk_usage(".").free
    console.print(
        f"\n{runs}: about {duration(seconds)} of compute time on this machine, up to {size(disk)} on disk. "
        "RAM: peak memory, not counting the program and the data."
    )
    if disk > free:
        console.print(f"The disk has only {size(free)} left.")
