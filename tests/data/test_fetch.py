import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from keel import KeelError
from keel.data.fetch import Download, fetch

CONTENT = bytes(range(256)) * 9000


class Server(ThreadingHTTPServer):
    """Serves CONTENT (or an archive) with ranges. Options: close the connection early, ignore ranges."""

    content = CONTENT
    close_after: int | None = None
    ranges = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges_requested: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        requested = self.headers.get("Range") if self.server.ranges else None
        self.server.ranges_requested.append(requested)
        start = int(requested.removeprefix("bytes=").removesuffix("-")) if requested else 0
        if start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if requested else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.close_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def download(server: Server, digest: str | None = None, members: tuple[str, ...] = ()) -> Download:
    return Download(server.url, digest or f"md5:{hashlib.md5(server.content).hexdigest()}", "set/file", members)


def test_a_file_is_downloaded_and_verified_once(server: Server, tmp_path: Path) -> None:
    reported: list[tuple[int, int | None]] = []
    fetch(download(server), tmp_path, lambda received, total: reported.append((received, total)))
    assert (tmp_path / "set/file").read_bytes() == CONTENT
    assert reported[-1] == (len(CONTENT), len(CONTENT))
    assert {p.name for p in (tmp_path / "set").iterdir()} <= {"file", "file.lock"}
    fetch(download(server), tmp_path, lambda *_: None)
    assert len(server.ranges_requested) == 1  # an existing file is not downloaded again


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_is_resumed(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.close_after = 1000
    with pytest.raises(KeelError, match=r"cannot be downloaded .* repeat the command to resume the download"):
        fetch(download(server), tmp_path, lambda *_: None)
    assert (tmp_path / "set/file.part").stat().st_size == 1000
    server.close_after, server.ranges = None, ranges
    fetch(download(server), tmp_path, lambda *_: None)
    assert server.ranges_requested == [None, "bytes=1000-" if ranges else None]
    assert (tmp_path / "set/file").read_bytes() == CONTENT


def test_a_complete_partial_file_is_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/file.part").write_bytes(CONTENT)
    fetch(download(server), tmp_path, lambda *_: None)
    assert (tmp_path / "set/file").read_bytes() == CONTENT


def test_a_file_that_is_not_the_published_one_is_deleted(server: Server, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"file\.part' is not the published file \(its md5 is .*, expected 00"):
        fetch(download(server, "md5:00"), tmp_path, lambda *_: None)
    assert {p.name for p in (tmp_path / "set").iterdir()} <= {"file.lock"}


def archive(**files: bytes) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return target.getvalue()


def test_only_the_named_files_of_an_archive_are_extracted(server: Server, tmp_path: Path) -> None:
    server.content = archive(**{"batches/one": b"1", "../outside": b"evil", "batches/two": b"2"})
    fetch(download(server, members=("batches/one", "batches/two")), tmp_path / "data", lambda *_: None)
    assert (tmp_path / "data/set/batches/one").read_bytes() == b"1"
    assert (tmp_path / "data/set/batches/two").read_bytes() == b"2"
    assert not list(tmp_path.rglob("outside"))


def test_an_archive_without_a_named_file_is_refused(server: Server, tmp_path: Path) -> None:
    server.content = archive(other=b"1")
    with pytest.raises(KeelError, match="file' has no file 'batches/one'"):
        fetch(download(server, members=("batches/one",)), tmp_path, lambda *_: None)


def test_the_error_for_an_unreachable_server_names_the_url_and_the_target_file(tmp_path: Path) -> None:
    nowhere = Download("http://127.0.0.1:9/file", "md5:00", "set/file")
    with pytest.raises(
        KeelError, match=r"http://127\.0\.0\.1:9/file cannot be downloaded .* or save the file as '.*set/file'"
    ):
        fetch(nowhere, tmp_path, lambda *_: None)


class Redirecting(BaseHTTPRequestHandler):
    """Answers with a redirection, or with a length that is no number."""

    location: str | None = None

    def do_GET(self) -> None:
        self.send_response(302 if self.location else 200)
        self.send_header(*(("Location", self.location) if self.location else ("Content-Length", "many")))
        self.end_headers()
        if not self.location:
            self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None:
        pass


def test_a_redirection_to_a_local_file_is_refused(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    server.RequestHandlerClass = type("ToFile", (Redirecting,), {"location": secret.as_uri()})
    with pytest.raises(KeelError, match="cannot be downloaded"):
        fetch(download(server), tmp_path / "data", lambda *_: None)
    assert not (tmp_path / "data/set/file").exists()


def test_a_length_that_is_no_number_is_ignored(server: Server, tmp_path: Path) -> None:
    server.RequestHandlerClass = Redirecting
    fetch(download(server), tmp_path, lambda *_: None)
    assert (tmp_path / "set/file").read_bytes() == CONTENT
