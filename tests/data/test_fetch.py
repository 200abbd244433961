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
    """Serves CONTENT (or an archive) with ranges; can be told to hang up after some bytes, or to ignore ranges."""

    content = CONTENT
    hang_up_after: int | None = None
    ranges = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range") if self.server.ranges else None
        self.server.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.hang_up_after])

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


def test_a_file_is_fetched_whole_and_checked(server: Server, tmp_path: Path) -> None:
    heard: list[tuple[int, int | None]] = []
    fetch(download(server), tmp_path, lambda there, total: heard.append((there, total)))
    assert (tmp_path / "set/file").read_bytes() == CONTENT
    assert heard[-1] == (len(CONTENT), len(CONTENT))
    assert {p.name for p in (tmp_path / "set").iterdir()} <= {"file", "file.lock"}
    fetch(download(server), tmp_path, lambda *_: None)
    assert len(server.asked) == 1  # what is there is not fetched again


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_was_cut_off_is_gone_on_with(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.hang_up_after = 1000
    with pytest.raises(KeelError, match=r"cannot be fetched .* what came is kept, and the same command goes on"):
        fetch(download(server), tmp_path, lambda *_: None)
    assert (tmp_path / "set/file.part").stat().st_size == 1000
    server.hang_up_after, server.ranges = None, ranges
    fetch(download(server), tmp_path, lambda *_: None)
    assert server.asked == [None, "bytes=1000-" if ranges else None]
    assert (tmp_path / "set/file").read_bytes() == CONTENT


def test_a_part_that_is_whole_already_is_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/file.part").write_bytes(CONTENT)
    fetch(download(server), tmp_path, lambda *_: None)
    assert (tmp_path / "set/file").read_bytes() == CONTENT


def test_a_file_that_is_not_the_published_one_does_not_stay(server: Server, tmp_path: Path) -> None:
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


def test_of_an_archive_the_named_files_are_taken_and_nothing_else(server: Server, tmp_path: Path) -> None:
    server.content = archive(**{"batches/one": b"1", "../outside": b"evil", "batches/two": b"2"})
    fetch(download(server, members=("batches/one", "batches/two")), tmp_path / "data", lambda *_: None)
    assert (tmp_path / "data/set/batches/one").read_bytes() == b"1"
    assert (tmp_path / "data/set/batches/two").read_bytes() == b"2"
    assert not list(tmp_path.rglob("outside"))


def test_an_archive_without_the_file_is_refused(server: Server, tmp_path: Path) -> None:
    server.content = archive(other=b"1")
    with pytest.raises(KeelError, match="file' has no file 'batches/one'"):
        fetch(download(server, members=("batches/one",)), tmp_path, lambda *_: None)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    nowhere = Download("http://127.0.0.1:9/file", "md5:00", "set/file")
    with pytest.raises(KeelError, match=r"http://127\.0\.0\.1:9/file cannot be fetched .* put at .* by hand"):
        fetch(nowhere, tmp_path, lambda *_: None)
