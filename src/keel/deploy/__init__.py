"""Deployment over Flower: the server app and client app of a federation, and Keel's algorithms in other Flower apps.

A name is imported when it is first used, so that `import keel.deploy` does not need Flower.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.deploy.local_sgd import LocalSGD, keel_mod
    from keel.deploy.server import server_app
    from keel.deploy.site import client_app
    from keel.deploy.strategy import KeelStrategy

_MODULES = {
    "server_app": "keel.deploy.server",
    "client_app": "keel.deploy.site",
    "KeelStrategy": "keel.deploy.strategy",
    "LocalSGD": "keel.deploy.local_sgd",
    "keel_mod": "keel.deploy.local_sgd",
}

__all__ = ["KeelStrategy", "LocalSGD", "client_app", "keel_mod", "server_app"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'keel.deploy' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
