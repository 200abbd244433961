"""A real federation over Flower: the server and the sites as Flower apps, and Keel's algorithms in other Flower apps.

Names are loaded when they are first used, as in keel itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.deploy.server import server_app
    from keel.deploy.site import client_app
    from keel.deploy.strategy import KeelStrategy, LocalSGD, keel_mod

_HOMES = {
    "server_app": "keel.deploy.server",
    "client_app": "keel.deploy.site",
    "KeelStrategy": "keel.deploy.strategy",
    "LocalSGD": "keel.deploy.strategy",
    "keel_mod": "keel.deploy.strategy",
}

__all__ = ["KeelStrategy", "LocalSGD", "client_app", "keel_mod", "server_app"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'keel.deploy' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
