"""`keel report --watch`: the page on a local address while runs are in progress.

The server listens on 127.0.0.1 alone and answers GET requests for the page, whose path begins with a random token. It
opens no file that a request names. A request must name the server's own address as its host, so that no other site can
reach it through a name that points to this machine.
"""

import re
from collections.abc import Callable, Sequence
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_urlsafe
from threading import Lock

from keel.errors import KeelError
from keel.report.comparison import Comparison
from keel.report.drawing import CannotDraw, browser_script
from keel.report.page import page_html, waiting_html
from keel.runs.finding import find_runs
from keel.runs.folder import RunFolder

ADDRESS = "127.0.0.1"
UPDATE = "update/"
"""Below the token, and before the number of a state: what an open page with that state asks for."""
KNOWN = re.compile(rf"({UPDATE}\d{{1,9}})?")
"""The paths below the token."""
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LivePage:
    """The page on the runs below some folders, made again if a run has changed."""

    def __init__(self, paths: Sequence[Path], compare: Callable[[list[RunFolder]], Comparison]):
        """
        Args:
            paths: Run folders, or folders that contain them, now or later.
            compare: Compares the runs in these folders.
        """
        for path in paths:
            if not path.is_dir():
                raise KeelError(f"run: {str(path)!r} does not exist; --watch requires a folder")
        self._paths, self._compare, self._lock = paths, compare, Lock()
        self._stamp: object = None
        self._comparison: Comparison | str = ""
        self._state = 0
        try:
            self._vega, self._problem = browser_script(), None
        except CannotDraw as error:
            self._vega, self._problem = "", str(error)

    def html(self) -> str:
        """Return the page as it is now."""
        with self._lock:
            self._refresh()
            return self._html(self._vega)

    def html_after(self, state: str) -> str | None:
        """Return the page without the script that draws charts; None if it is still in that state."""
        with self._lock:
            self._refresh()
            return None if state == str(self._state) else self._html("")

    def _html(self, vega: str) -> str:
        update = f"{UPDATE}{self._state}"
        if isinstance(self._comparison, str):
            return waiting_html(self._comparison, vega, update)
        return page_html(self._comparison, vega, self._problem, update)

    def _refresh(self) -> None:
        """Compare the runs again if one has changed, and count the states."""
        try:
            folders = find_runs(self._paths)
            stamp = [(folder.path, _stamp(folder.metrics), _stamp(folder.summary_file)) for folder in folders]
            if stamp == self._stamp:
                return
            content: Comparison | str = self._compare(folders)
            self._stamp = stamp
        except KeelError as error:  # no run yet, or none that was evaluated
            if str(error) == self._comparison:
                return
            content = str(error)
        self._comparison = content
        self._state += 1


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


class Server(ThreadingHTTPServer):
    """Serves a live page at `address` until it is closed."""

    daemon_threads = True

    def __init__(self, page: LivePage):
        super().__init__((ADDRESS, 0), _Handler)
        self.page = page
        self.token = token_urlsafe(24)

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "Keel", ""

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        if host not in (f"{ADDRESS}:{self.server.server_port}", f"localhost:{self.server.server_port}"):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
            return
        token, _, name = self.path.removeprefix("/").partition("/")
        if not compare_digest(token.encode(), self.server.token.encode()) or not KNOWN.fullmatch(name):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        html = self.server.page.html_after(name.removeprefix(UPDATE)) if name else self.server.page.html()
        content = (html or "").encode()
        self.send_response(HTTPStatus.NO_CONTENT if html is None else HTTPStatus.OK)
        for header, value in HEADERS.items():
            self.send_header(header, value)
        if html is not None:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: an open page asks every two seconds."""
