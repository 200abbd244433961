"""keel algorithms."""

from keel.commands.options import AsJson, print_json


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

    from keel.terminal import print_table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "paper", "keeps memory", "down", "up", "cost"):
        table.add_column(name, justify="right" if name in ("down", "up", "cost") else "left", no_wrap=True)
    for row in rows:
        memory = "yes" if row["stateful"] else "no"
        traffic = [f"{row[key]:g}" for key in ("down", "up", "relative_cost")]
        table.add_row(row["name"], row["paper"], memory, *traffic)
    print_table(table)
