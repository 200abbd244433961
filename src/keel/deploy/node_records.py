"""Which node a site had, according to the audit logs of the server."""

import json
from pathlib import Path


def last_node(folder: Path, site: int) -> int | None:
    """Return the node with which a site last joined a training of the federation in `folder`; None if none did."""
    joins: list[tuple[str, int]] = []
    for file in folder.glob("*/*.audit.jsonl"):
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
                if line["event"] == "join" and line["site"] == site:
                    joins.append((line["time"], line["node"]))
            except (ValueError, KeyError, TypeError):  # keel deploy audit verify reports a damaged line
                continue
    return max(joins)[1] if joins else None


def unregister_text(folder: Path, site: int) -> str:
    """Return how to unregister the node of a site."""
    node = last_node(folder, site)
    if node is not None:
        return f"flwr supernode unregister {node} federation"
    return (
        "flwr supernode unregister NODE-ID federation (site "
        f"{site} has joined no training here; flwr supernode list federation prints the nodes, and flwr supernode "
        "register printed the NODE-ID of the site's key)"
    )
