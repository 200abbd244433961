"""keel report --watch: the page on a local address, with real requests."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from keel import make_spec
from keel.report.comparison import compare
from keel.report.watch import LivePage, Server
from keel.runs.folder import RunFolder
from tests.conftest import Called
from tests.report.test_comparison import algorithm, environment
from tests.report.test_page import rising, write_full_run

SECRET = "the content of a file next to the runs"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "runs").mkdir()
    (tmp_path / "secret.txt").write_text(SECRET)
    page = LivePage([tmp_path / "runs"], lambda folders: compare(folders, skip_damaged=True))
    with Server(page) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def request(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content, dict(answer.headers)


def unfinished_run(path: Path, rounds: int) -> RunFolder:
    spec = make_spec({"rounds": 50, **algorithm("fedavg")})
    folder = RunFolder.create(path, spec, environment(spec))
    for t in range(1, rounds + 1):
        append(folder, t)
    return folder


def append(folder: RunFolder, t: int) -> None:
    folder.append({"round": t, "cohort": [0], "bytes_down": 1, "bytes_up": 1, "accuracy": t / 100}, 0.1)


def test_it_listens_on_loopback_alone_and_has_a_secret_in_its_address(server: Server) -> None:
    address = urlsplit(server.address)
    assert (address.hostname, server.socket.getsockname()[0]) == ("127.0.0.1", "127.0.0.1")
    assert len(address.path) >= 32
    with Server(server.page) as another:
        assert another.token != server.token


def test_the_page_waits_for_runs_and_then_follows_them(server: Server, tmp_path: Path) -> None:
    path = urlsplit(server.address).path
    status, page, headers = request(server, path)
    assert status == 200
    assert "Waiting for runs" in page
    assert headers["Cache-Control"] == "no-store"
    update = page.split('data-update="')[1].split('"')[0]
    assert request(server, path + update)[0] == 204
    folder = unfinished_run(tmp_path / "runs/a", 3)
    status, newer, _ = request(server, path + update)
    assert (status, "digits, mlp" in newer) == (200, True)
    assert len(newer) < len(request(server, path)[1]) / 2  # without the script that draws charts
    update = newer.split('data-update="')[1].split('"')[0]
    assert request(server, path + update)[0] == 204
    append(folder, 4)
    assert request(server, path + update)[0] == 200


def test_its_policy_lets_the_page_connect_to_its_server_alone(server: Server) -> None:
    page = request(server, urlsplit(server.address).path)[1]
    policy = page.split('Content-Security-Policy" content="')[1].split('"')[0]
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in policy
    assert policy.endswith("connect-src &#39;self&#39;")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/x/",
        "//",
        "/TOKENx/",
        "/TOKEN/../secret.txt",
        "/TOKEN/secret.txt",
        "/TOKEN/update/../../secret.txt",
        "/TOKEN/%2e%2e/secret.txt",
        "/TOKEN/update/x",
    ],
)
def test_no_path_leaves_the_page(server: Server, path: str) -> None:
    status, content, _ = request(server, path.replace("TOKEN", server.token))
    assert (status, content) == (404, "")


def test_a_wrong_token_is_refused(server: Server) -> None:
    wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    assert request(server, f"/{wrong}/")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:PORT", ""])
def test_a_wrong_host_is_refused(server: Server, host: str) -> None:
    named = host.replace("PORT", str(server.server_port))
    status, content, _ = request(server, urlsplit(server.address).path, host=named)
    assert (status, content) == (421, "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    assert request(server, urlsplit(server.address).path, method)[0] == 405


def test_garbage_does_not_end_the_server(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port)) as raw:
        raw.sendall(b"\x00\xff not http\r\n\r\n")
        raw.recv(100)
    assert request(server, urlsplit(server.address).path)[0] == 200


def test_an_open_page_is_updated_without_a_reload_and_keeps_the_selection(
    server: Server, browser: Any, tmp_path: Path
) -> None:
    write_full_run(tmp_path / "runs/a", rising(40), **algorithm("fedavg"))
    page = browser.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(server.address)
    page.wait_for_selector("[data-drawn=accuracy-over-rounds]")
    page.select_option(".over", "bytes")
    page.evaluate("window.kept = true")
    write_full_run(tmp_path / "runs/b", rising(20), **algorithm("ghbm"))
    page.wait_for_selector(".results tbody tr:nth-child(2)")
    page.wait_for_selector("[data-drawn=accuracy-over-bytes] canvas")
    assert page.evaluate("window.kept") is True
    assert complaints == []
    page.close()


def test_the_command_prints_the_address_and_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    unfinished_run(tmp_path / "runs/a", 3)
    command = [sys.executable, "-m", "keel", "report", "runs", "--watch"]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    address = process.stdout.readline().split()[0]
    with urlopen(address) as answer:
        assert "digits, mlp" in answer.read().decode()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("option", [["--json"], ["--format", "csv"], ["--charts", "charts"]])
def test_options_of_a_file_are_refused(option: list[str], keel: Callable[..., Called], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    called = keel("report", "runs", "--watch", *option)
    assert (called.code, called.err) == (2, "keel: --watch excludes --json, --format and --charts; give one of them\n")


def test_a_folder_that_does_not_exist_is_refused(keel: Callable[..., Called]) -> None:
    called = keel("report", "nowhere", "--watch")
    assert (called.code, called.out) == (2, "")
    assert "'nowhere' does not exist; --watch requires a folder" in called.err
