"""Files that are replaced as a whole."""

from pathlib import Path

from keel.runs.files import write_atomic


def test_the_old_content_is_kept_under_the_other_name(tmp_path: Path) -> None:
    file, kept = tmp_path / "state", tmp_path / "previous"
    for content in (b"1", b"2", b"3"):
        write_atomic(file, [content], keep=kept)
    assert (file.read_bytes(), kept.read_bytes()) == (b"3", b"2")
    assert sorted(tmp_path.iterdir()) == [kept, file]


def test_nothing_else_is_left_if_a_kill_has_left_both_names_with_the_same_content(tmp_path: Path) -> None:
    file, kept = tmp_path / "state", tmp_path / "previous"
    file.write_bytes(b"1")
    kept.hardlink_to(file)  # between the two renames of a save
    write_atomic(file, [b"2"], keep=kept)
    assert (file.read_bytes(), kept.read_bytes()) == (b"2", b"1")
    assert sorted(tmp_path.iterdir()) == [kept, file]
