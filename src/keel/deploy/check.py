"""`keel deploy check`: run a federation's app in one process, on synthetic data."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from keel.config.overrides import flatten
from keel.core.records import last_value, primary_metric
from keel.deploy.flower_adapter import InProcessGrid
from keel.deploy.site_policy import POLICY
from keel.errors import KeelError
from keel.runs.folder import RunFolder
from keel.units import size


def check_app(folder: Path, rounds: int) -> str:
    """Run the app in `folder` for up to `rounds` rounds on synthetic data, and return a summary of one line."""
    try:
        app = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        config, components = flatten(app["config"]), app["components"]
        sites, rounds = config["federation.sites"], min(rounds, config.get("rounds", rounds))
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise KeelError(
            f"folder {str(folder)!r} has no Flower app for Keel ({error!r}); create one with keel deploy new"
        ) from None
    server = _load_app(folder, components["serverapp"], ServerApp)
    client = _load_app(folder, components["clientapp"], ClientApp)
    with TemporaryDirectory(prefix="keel-check-") as scratch:
        # Apps of an earlier version of Keel have no policy.
        policy = {POLICY: str(file)} if (file := folder / "site.toml").exists() else {}
        # Apps that an earlier version of Keel created read "made-up" instead of "synthetic".
        nodes = [
            {"site": n, "synthetic": True, "made-up": True, "state-dir": f"{scratch}/site-{n}", **policy}
            for n in range(sites)
        ]
        run_config = {key: value for key, value in config.items() if key not in OVERRIDDEN}
        run_config |= {
            "rounds": rounds,
            "federation.out": f"{scratch}/run",
            "federation.timeout_seconds": 1,
            "federation.wait_seconds": 1,
        }
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config)
        server(InProcessGrid(client, nodes), context)
        run = RunFolder.open(Path(scratch) / "run")
        summary = run.summary
        assert summary is not None  # the server app writes it before it returns
        primary = primary_metric(summary)
        dropped = sum(len(record.get("dropped", {})) for record in run.records())
        examples = [site["examples"] for site in run.environment["sites"]]
    if dropped:
        raise KeelError(f"{folder}: the server dropped {dropped} replies of the sites; the log above says why")
    bytes_per_site = (summary["bytes_down"] + summary["bytes_up"]) / rounds / sites
    return (
        f"{summary['status']}: {rounds} rounds over {sites} sites with synthetic data "
        f"({', '.join(map(str, examples))} examples), "
        f"{summary['parameters']:,} parameters, {primary.label} {primary.text(last_value(summary))}, "
        f"{size(bytes_per_site)} per site and round"
    )


OVERRIDDEN = ("federation.timeout", "federation.wait")
"""Deprecated names of settings that the check overrides."""


def _load_app(folder: Path, reference: str, kind: type) -> Any:
    """Import the app "package.module:name" from that folder."""
    module, _, name = reference.partition(":")
    sys.path.insert(0, str(folder.absolute()))
    try:
        app = getattr(import_module(module), name)
    except Exception as error:  # the user's module may raise anything
        raise KeelError(f"{reference} cannot be imported ({type(error).__name__}: {error})") from error
    finally:
        sys.path.pop(0)
    if not isinstance(app, kind):
        raise KeelError(f"{reference} must be a {kind.__name__} (got a {type(app).__name__})")
    return app
