"""Approval of code: a node runs only the app whose hash the site has pinned, and fails closed."""

import os
import stat
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.app import Message, RecordDict

from keel.deploy.approval import App, Approval, read_app
from keel.deploy.flower_adapter import InProcessGrid, _pull_checked, build_bundle
from keel.deploy.new import new_federation
from keel.deploy.node import ApprovedOnly, audit_folder
from keel.deploy.state_folder import state_folder
from tests.conftest import Called
from tests.deploy.requests import audit_lines

Keel = Callable[..., Called]


def bundle(files: dict[str, bytes | str], compression: int = ZIP_DEFLATED) -> bytes:
    stream = BytesIO()
    with ZipFile(stream, "w", compression) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return stream.getvalue()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    new_federation(tmp_path / "study", 3, "fedhbm")
    return tmp_path / "study"


def test_the_hash_depends_on_paths_and_contents_alone() -> None:
    files: dict[str, bytes | str] = {"a.py": "x = 1\n", "b.py": "y = 2\n", ".info/CONTENT": "list"}
    first = read_app(bundle(files))
    assert first.hash == read_app(bundle(dict(reversed(files.items())), ZIP_STORED)).hash
    assert first.hash != read_app(bundle({**files, "a.py": "x = 2\n"})).hash
    assert first.hash != read_app(bundle({"a.py": "x = 1\n", "c.py": "y = 2\n"})).hash
    assert first.hash != read_app(bundle({**files, "c.py": ""})).hash
    assert App({"a": b"1\n2"}).hash != App({"a": b"1", "b": b"2"}).hash


UNSAFE = {
    "parent": {"../outside.py": ""},
    "absolute": {"/etc/cron.d/job": ""},
    "inner parent": {"a/../../outside.py": ""},
    "newline in a name": {"a.py\nb.py": ""},
    "escape sequence in a name": {"a\x1b[2K.py": ""},
    "right-to-left override in a name": {"a\u202eyp.txt": ""},
    "same name on another file system": {"a.py": "good", "A.py": "bad"},
}


@pytest.mark.parametrize("case", UNSAFE)
def test_a_bundle_that_could_write_anything_else_is_refused(case: str) -> None:
    with pytest.raises(KeelError, match="app bundle"):
        read_app(bundle(dict(UNSAFE[case])))


def test_two_files_of_one_name_are_refused_and_so_is_what_is_not_a_zip_file() -> None:
    stream = BytesIO()
    with ZipFile(stream, "w") as archive:
        archive.writestr("a.py", "good")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.py", "bad")
    with pytest.raises(KeelError, match="same name"):
        read_app(stream.getvalue())
    with pytest.raises(KeelError, match="not a zip file"):
        read_app(b"import os")


def test_a_bundle_whose_compressed_data_are_damaged_is_refused() -> None:
    content = bytearray(bundle({"a.py": "x = 1\n" * 100}))
    content[30 + len("a.py")] = 0xFF  # the first byte after the header
    with pytest.raises(KeelError, match="not a zip file"):
        read_app(bytes(content))


HIDDEN: dict[str, tuple[bytes | None, bytes | None, str]] = {
    "form feed": (b"a = 1\n", b"a = 1\x0c\n", "+a = 1\\x0c"),
    "carriage return": (b"a = 1\nb = 2\n", b"a = 1\rb = 2\n", "+a = 1\\x0db = 2"),
    "line separator": (b"# a\nb\n", "# a\u2028b\n".encode(), "+# a\\u2028b"),
    "last newline": (b"a = 1\n", b"a = 1", "-"),
    "byte that is not UTF-8": (b"'\\xff'\n", b"'\xff'\n", "+'\\xff'"),
    "new empty file": (None, b"", "added a.py"),
    "removed empty file": (b"", None, "removed a.py"),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_a_diff_shows_every_change(case: str) -> None:
    old, new, line = HIDDEN[case]
    before, after = (App({} if content is None else {"a.py": content}) for content in (old, new))
    assert line in after.diff(before).split("\n")
    assert after.diff(after) == ""


def test_the_command_prints_no_control_or_format_characters(keel: Keel, tmp_path: Path) -> None:
    hidden = "evil()\x1b[2K\r# good\x08\u202e\u200b\x9b\ttab, Grüße\n"
    file = tmp_path / "app.fab"
    for name, content in ("first", hidden), ("second", f"x = 1\n{hidden}y = 2\n"):
        file.write_bytes(bundle({"a.py": content.encode() + b"\xff"}))
        shown = keel("deploy", "approve", str(file), "--yes").out
        assert "evil()\\x1b[2K\\x0d# good\\x08\\u202e\\u200b\\x9b\ttab, Grüße\n" in shown, name
        assert all(c in "\n\t" or c.isprintable() for c in shown), name
    assert "no file has changed" not in shown
    assert "no file has changed" in keel("deploy", "approve", str(file), "--yes").out


def test_without_a_valid_approval_everything_is_refused(app: Path, tmp_path: Path) -> None:
    approval, content = Approval(tmp_path / "approved"), build_bundle(app)
    with pytest.raises(KeelError, match="no app is approved"):
        approval.check(content, tmp_path / "refused.fab")
    assert approval.approve(content) == approval.check(content, tmp_path / "refused.fab")
    pin = tmp_path / "approved" / "approved.json"
    for damaged in "", "{}", '{"hash": 1}', '{"hash": ""}':
        pin.write_text(damaged)
        with pytest.raises(KeelError, match="is refused"):
            approval.check(content, tmp_path / "refused.fab")


def test_the_files_of_an_approval_are_private(app: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Approval(tmp_path / "approved").approve(build_bundle(app))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "approved").iterdir()}
    assert modes == {"approved.fab": 0o600, "approved.json": 0o600}
    assert stat.S_IMODE((tmp_path / "approved").stat().st_mode) == 0o700


def test_the_command_shows_files_and_differences_and_asks(
    keel: Keel, app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = keel("deploy", "approve", str(app), "--yes")
    assert first.code == 0, first.err
    assert "study/task.py" in first.out
    assert "def site_data(node):" in first.out, "the first approval shows the code itself"
    assert "bytes  site.toml" not in first.out, "the policy is no part of the app"
    task = app / "study" / "task.py"
    task.write_text(task.read_text().replace("nn.ReLU()", "nn.Tanh()"))
    monkeypatch.setattr("sys.stdin", StringIO("n\n"))
    declined = keel("deploy", "approve", str(app))
    assert declined.code == 2
    assert "the app is not approved" in declined.err
    approval = Approval(tmp_path / "approved")
    with pytest.raises(KeelError, match="is refused"):
        approval.check(build_bundle(app), tmp_path / "state" / "refused.fab")
    refused = tmp_path / "state" / "refused.fab"
    monkeypatch.setattr("sys.stdin", StringIO("y\n"))
    second = keel("deploy", "approve", str(refused))
    assert second.code == 0, second.err
    changed = [line for line in second.out.splitlines() if line.startswith(("-  ", "+  "))]
    assert [line[0] for line in changed] == ["-", "+"]
    assert "nn.Tanh()" in changed[1]
    approval.check(build_bundle(app), refused)


class NodeState(SimpleNamespace):
    """What the check reads of Flower's state of a node."""

    def get_run(self, run_id: int) -> Any:
        return self.runs.get(run_id)

    def get_fab(self, fab_hash: str) -> Any:
        return self.bundles.get(fab_hash)


def pull_as_flower_does(**parts: Any) -> int:
    """The order of Flower's calls; it records what Flower would install."""
    message, _ = parts["receive"]()
    state, run_id = parts["state"], message.metadata.run_id
    if state.get_run(run_id) is None:
        run = parts["get_run"](run_id)
        state.bundles[run.fab_hash] = parts["get_fab"](run.fab_hash, run_id)
        state.runs[run_id] = run
    state.installed.append(parts["node_config"])
    return int(run_id)


def offer(check: Any, content: bytes, state: NodeState, **run: Any) -> list[str]:
    """Offer a run with this bundle to a node; return the reasons of its error replies."""
    from hashlib import sha256

    InProcessGrid(None, [])  # type: ignore[arg-type]  # it sets the identity that messages need
    digest = sha256(content).hexdigest()
    described = {"fab_id": "study/study", "fab_version": "1.0.0", "fab_hash": digest, "primary_task_type": "", **run}
    message = Message(RecordDict(), 1, "query", ttl=1.0)
    replies: list[str] = []
    parts = {
        "state": state,
        "object_store": None,
        "node_config": {"site": 0},
        "receive": lambda: (message, None),
        "get_run": lambda run_id: SimpleNamespace(**described),
        "get_fab": lambda fab_hash, run_id: SimpleNamespace(content=content, hash_str=run.get("hash_str", digest)),
    }
    _pull_checked(pull_as_flower_does, lambda reply, *_: replies.append(reply.error.reason), check, parts)
    return replies


def test_a_node_checks_every_message_and_passes_hash_and_policy_to_the_app(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    approval, content = Approval(tmp_path / "approved"), build_bundle(app)
    check = ApprovedOnly(approval, tmp_path / "site.toml", tmp_path / "state")
    state = NodeState(runs={}, bundles={}, installed=[])
    assert offer(check, content, state) == ["approval: AppNotApproved"]
    assert state.installed == []
    assert (tmp_path / "state" / "refused.fab").read_bytes() == content
    assert not (tmp_path / "approved").exists(), "a node does not write the folder of the approval"
    digest = approval.approve(content)
    assert offer(check, content, state) == []
    assert state.installed == [{"site": 0, "app": digest, "policy": str(tmp_path / "site.toml")}]
    (tmp_path / "approved" / "approved.json").unlink()
    assert offer(check, content, state) == ["approval: AppNotApproved"], "also for a run that it knows"
    assert [line["event"] for line in audit_lines(tmp_path / "state")] == ["refused", "refused"]


def test_a_check_that_cannot_write_refuses_the_app_and_the_node_stays(app: Path, tmp_path: Path) -> None:
    (tmp_path / "approved").write_text("a file in place of the folder")
    check = ApprovedOnly(Approval(tmp_path / "approved"), tmp_path / "site.toml", tmp_path / "state")
    state = NodeState(runs={}, bundles={}, installed=[])
    assert offer(check, build_bundle(app), state) == ["approval: AppNotApproved"]


def test_a_node_that_cannot_write_its_audit_log_refuses_and_stays(
    app: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file in place of the folder")
    check = ApprovedOnly(Approval(tmp_path / "approved"), tmp_path / "site.toml", tmp_path / "state")
    state = NodeState(runs={}, bundles={}, installed=[])
    assert offer(check, build_bundle(app), state) == ["approval: AppNotApproved"]
    assert state.installed == []
    assert "could not write its audit log" in caplog.text


@pytest.mark.parametrize("settings", ["site=3", 'site=3 state-dir="/srv/state"'])
def test_the_node_and_its_client_app_write_one_audit_log(settings: str) -> None:
    arguments = ["--superlink", "127.0.0.1:1", "--node-config", settings]
    expected = Path("/srv/state") if "state-dir" in settings else state_folder({}, "site-3")
    assert audit_folder(arguments) == expected


WRONG = {
    "the name of another app": {"fab_id": "other/app"},
    "another version": {"fab_version": "2.0.0"},
    "the hash of another bundle": {"fab_hash": "0" * 64},
    "another hash with the bundle": {"hash_str": "0" * 64},
    "another program": {"primary_task_type": "flwr-agentapp"},
}


@pytest.mark.parametrize("case", WRONG)
def test_an_approved_bundle_does_not_open_the_door_to_an_installed_app(
    case: str, app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    approval, content = Approval(tmp_path / "approved"), build_bundle(app)
    approval.approve(content)
    state = NodeState(runs={}, bundles={}, installed=[])
    check = ApprovedOnly(approval, tmp_path / "site.toml", tmp_path / "state")
    assert offer(check, content, state, **WRONG[case]) == ["approval: WrongBundle"]
    assert state.installed == []
    (line,) = audit_lines(tmp_path / "state")
    assert (line["event"], line["reason"], line["kind"]) == ("refused", "approval: WrongBundle", "query")


def approved_and_installed(
    app: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[bytes, Path, ApprovedOnly]:
    """Approve an app that Flower has installed; return its bundle, the installed folder and the site's check."""
    from flwr.cli.install import install_from_fab

    monkeypatch.setenv("FLWR_HOME", str(folder / "home"))
    approval, content = Approval(folder / "approved"), build_bundle(app)
    approval.approve(content)
    check = ApprovedOnly(approval, folder / "site.toml", folder / "state")
    return content, install_from_fab(content, skip_prompt=True), check


def test_an_app_that_is_installed_already_is_removed_before_it_is_installed_again(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower does not install over an existing folder, whose files may have been changed."""
    content, installed, check = approved_and_installed(app, tmp_path, monkeypatch)
    (installed / "study" / "client.py").write_text("changed")
    assert offer(check, content, NodeState(runs={}, bundles={}, installed=[])) == []
    assert not installed.exists()


def test_an_installed_app_that_cannot_be_removed_is_refused(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, installed, check = approved_and_installed(app, tmp_path, monkeypatch)

    def fail(path: Any, **options: Any) -> None:
        if not options.get("ignore_errors"):
            raise PermissionError(path)

    state = NodeState(runs={}, bundles={}, installed=[])
    with monkeypatch.context() as patch:
        patch.setattr("keel.deploy.flower_adapter.rmtree", fail)
        assert offer(check, content, state) == ["approval: PermissionError"]
    assert state.installed == []
    elsewhere = installed.rename(tmp_path / "elsewhere")
    installed.symlink_to(elsewhere)
    assert offer(check, content, state) == []
    assert not installed.is_symlink()
    assert elsewhere.exists(), "only the link is removed"
