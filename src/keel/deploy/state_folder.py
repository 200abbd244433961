"""The folder of a site's client state. Apart from `site_state.py`, so that a node starts without PyTorch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_data_path

from keel.deploy.flower_adapter import log


def state_folder(node_config: Mapping[str, Any], default_name: str) -> Path:
    """Return the folder `state-dir` of a node's configuration, or `default_name` in the user's data folder."""
    if "state-dir" in node_config:
        return Path(str(node_config["state-dir"]))
    if "memory" in node_config:
        log.warning("node config: 'memory' is deprecated; rename it to 'state-dir'")
        return Path(str(node_config["memory"]))
    return user_data_path("keel") / default_name
