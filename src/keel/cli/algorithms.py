"""The command `keel algorithms`."""

from keel.cli.options import AsJson, print_json


def algorithms(as_json: AsJson = False) -> None:
    """List the algorithms and what they send.

    Example: keel algorithms --json
    """
    from keel.algorithms import REGISTRY, describe

    rows = [describe(cls) for cls in REGISTRY.values()]
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    from keel.cli.terminal import console, print_table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))  # 80 columns are enough
    for name in ("name", "paper", "client\nstate", "mean\nsuffices"):
        table.add_column(name, no_wrap=True)
    for name in ("down", "up", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        properties = ["yes" if row[key] else "no" for key in ("stateful", "mean_suffices")]
        traffic = [f"{row[key]:g}" for key in ("down", "up", "relative_cost")]
        table.add_row(row["name"], row["paper"], *properties, *traffic)
    print_table(table)
    console.print(
        "\nclient state: clients keep state between rounds.\n"
        "mean suffices: the server needs only the mean of the reports.\n"
        "down, up: model-sized vectors sent to and from each client in a round.\n"
        "cost: bytes per round relative to FedAvg."
    )
