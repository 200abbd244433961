"""A real federation of three sites on this machine, with the app `federated_app` and an approved copy of it."""

import json
import shutil
from pathlib import Path
from typing import Any

from keel.deploy.approval import Approval
from keel.deploy.credentials import make_certificates
from keel.deploy.flower_adapter import build_bundle
from keel.deploy.new import new_federation
from tests.deploy import federated_app
from tests.deploy.in_process import CONFIG
from tests.deploy.policies import policy_text
from tests.deploy.processes import NGINX, Federation

SITES = len(federated_app.SIZES)
MALICIOUS_SITE = 2
CLIENT = """from pathlib import Path

from three_sites.task import client

Path({marker!r}).touch()
app = client
"""
"""The module of the client app. It creates a file when a site imports it; the server does not import it."""
EXPERIMENT: dict[str, Any] = {**CONFIG, "evaluation.every": 100, "evaluation.last": 1, "seed": 3}


def new_three_sites(folder: Path) -> Federation:
    """Make the folder of a federation, with certificates, a policy and an approval that its sites share."""
    new_federation(folder, SITES, "fedhbm")
    package = folder / "three_sites"
    shutil.copy(federated_app.__file__, package / "task.py")
    (package / "server.py").write_text("from three_sites.task import server\n\napp = server\n")
    (package / "client.py").write_text(CLIENT.format(marker=str(folder / "marker-1")))
    federation = Federation(folder, SITES)
    config = {**EXPERIMENT, "federation.timeout_seconds": 60, "federation.wait_seconds": 600}
    config |= {"federation.out": str(federation.runs), "federation.study": "three-sites"}
    project = (folder / "pyproject.toml").read_text().split("[tool.flwr.app.config]")[0]
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    (folder / "pyproject.toml").write_text(project + "[tool.flwr.app.config]\n" + "\n".join(lines) + "\n")
    connection = folder / ".flwr" / "config.toml"
    connection.write_text(connection.read_text().replace("8000", str(federation.port)))
    make_certificates(folder / "certificates", ["127.0.0.1"])
    (folder / "site.toml").write_text(policy_text(study="three-sites", algorithms=[*federated_app.METHODS]))
    Approval(folder / "approved").approve(build_bundle(folder))
    return federation


def start_three_sites(federation: Federation) -> None:
    federation.start_server()
    if NGINX:
        federation.start_proxy()
    for site in range(SITES):
        federation.add_site(site)
        start_node(federation, site)


def start_node(federation: Federation, site: int) -> None:
    federation.start_node(site, "malicious=true" if site == MALICIOUS_SITE else "")
