"""`keel deploy proxy`: the configuration of the reverse proxy in front of the server."""

import re
from importlib.resources import files
from pathlib import Path

from keel.errors import KeelError

ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[0-9.]+):\d{1,5}")
SIZE = re.compile(r"[1-9]\d*[kmg]")


def proxy_values(
    listen: str = "0.0.0.0:8443", superlink: str = "127.0.0.1:8000", largest_body: str = "16m"
) -> dict[str, str]:
    """Return the values of the template `nginx.conf`.

    Args:
        listen: Address and port on which the sites reach the proxy.
        superlink: Address and port of Flower's server.
        largest_body: Size above which the proxy refuses a request, as `16m`. Flower sends arrays in pieces of 5 MiB.
    """
    for name, address in ("listen", listen), ("superlink", superlink):
        if not ADDRESS.fullmatch(address):
            raise KeelError(f"{name} must be an IP address and a port, as 0.0.0.0:8443 (got {address!r})")
    if not SIZE.fullmatch(largest_body):
        raise KeelError(f"largest-body must be a number with the unit k, m or g, as 16m (got {largest_body!r})")
    return {"listen": listen, "superlink": superlink, "largest_body": largest_body}


def write_proxy(folder: Path, values: dict[str, str]) -> Path:
    """Write nginx.conf into the folder of a federation, and return its path."""
    if not (folder / "start_proxy.sh").exists():
        raise KeelError(f"folder {str(folder)!r} is not a federation's; create one with keel deploy new")
    template = files("keel.deploy").joinpath("template", "nginx.conf.in").read_text(encoding="utf-8")
    (folder / "nginx.conf").write_text(substitute(template, values), encoding="utf-8")
    return folder / "nginx.conf"


def substitute(text: str, values: dict[str, str]) -> str:
    """Replace each @name@ by its value."""
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)
