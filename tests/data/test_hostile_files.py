"""Files that are damaged or written to harm: one line says why they are refused, before anything large is allocated."""

import io
import os
import struct
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults._dataset_readers import SPLIT, landmark_files
from faults._hostile_arrays import header
from faults._hostile_hdf5 import HDF5
from faults._hostile_images import POSTSCRIPT, large_png
from faults._small_files import picture
from keel import KeelError
from keel.data import (
    arrays,
    cifar,
    femnist,
    images,
    landmarks,
    leaf,
    shakespeare,
    stackoverflow,
    store,
    table,
    targets,
    text,
)
from keel.data.fetch import Download, fetch


@pytest.mark.parametrize(
    "content",
    [
        header("(1000000000000000000,)", "'<f4'"),
        header("(4, 1000000000)", "'<f4'"),
        header("(4,)", "'|S0'"),  # numpy divides by the size of an element, which ends the process
        header("(-1,)", "'<f4'"),
        header("(True, 4)", "'<f4'"),
        header("(4,", "'<f4'"),
        header("(4,)", "'|O'"),
        header("(4,)", "[]"),
        header("(2,)", "'<U1'")[:-32] + struct.pack("<II", 0x110000, 65),  # no character has this number
        b"\x93NUMPY\x03\x00",
    ],
)
def test_an_array_with_a_hostile_header_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(KeelError, match=r"data.inputs: .*a.npy' is not a .npy array of numbers or text"):
        arrays.read(tmp_path / "a.npy", "data.inputs")


def test_a_pipe_in_place_of_an_array_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(KeelError, match=r"is not a .npy array"):
        arrays.read(tmp_path / "a.npy", "data.inputs")


@pytest.mark.parametrize(
    "keys", [np.zeros(4, [("a", "i4")]), np.array([0, 1, np.nan, 1]), np.zeros(4, np.complex64)], ids=["V", "nan", "c"]
)
def test_keys_are_numbers_or_texts(keys: np.ndarray) -> None:
    part = np.zeros((4, 1)), np.arange(4)
    with pytest.raises(KeelError, match=r"data.keys must be numbers or texts"):
        arrays.make_dataset(part, part, keys)


def test_numbers_to_predict_are_finite_as_floats() -> None:
    part = np.zeros((2, 1)), np.array([1e300, 0.5])
    with pytest.raises(KeelError, match=r"data.labels must be finite as 32-bit floats \(got 1e\+300\)"):
        arrays.make_dataset(part, part, None)


@pytest.mark.parametrize("column", ["client", "label"])
def test_a_cell_that_every_row_would_have_to_hold_is_refused(column: str, tmp_path: Path) -> None:
    long = "x" * 100_000
    row = f"{long},1,a" if column == "client" else f"a,1,{long}"
    (tmp_path / "t.csv").write_text(f"client,age,label\n{row}\n" + "b,1,2\n" * 9)
    with pytest.raises(KeelError, match=f"column '{column}' must have at most 256 characters per row") as error:
        table.table(file=str(tmp_path / "t.csv"), client="client", label="label")
    assert len(str(error.value)) < 500


def test_a_parquet_file_whose_names_are_no_text_is_refused(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import table as arrow_table

    parquet.write_table(arrow_table({"client": ["a"], "qqqq": [1]}), tmp_path / "t.parquet")
    content = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(content.replace(b"qqqq", b"qqq\xe8"))
    with pytest.raises(KeelError, match="is not a Parquet file"):
        table.table(file=str(tmp_path / "t.parquet"), client="client", label="qqqq")


def test_a_parquet_file_whose_texts_are_not_utf_8_is_refused(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import table as arrow_table

    parquet.write_table(arrow_table({"client": ["qqqq"], "label": [1]}), tmp_path / "t.parquet", write_statistics=False)
    content = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(content.replace(b"qqqq", b"qqq\xe8"))
    with pytest.raises(KeelError, match="has a column 'client' that is not UTF-8"):
        table.table(file=str(tmp_path / "t.parquet"), client="client", label="label")


def test_sequences_of_no_elements_are_refused() -> None:
    with pytest.raises(KeelError, match=r"must be whole numbers, one row per example \(got shape \(3, 0\)\)"):
        targets.convert_targets(np.zeros((3, 0), np.int64), "sequence", "data.labels")


def test_a_small_image_file_that_declares_a_large_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(large_png(9000, 9000))
    with pytest.raises(KeelError, match=r"must have at most 67,108,864 pixels \(got 9000x9000\)"):
        images.decode(tmp_path / "a.png", 8)


def test_only_formats_that_pillow_decodes_itself_are_opened(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(POSTSCRIPT)  # Pillow would run Ghostscript
    with pytest.raises(KeelError, match=r"a.png' is damaged or not an image .*cannot identify"):
        images.decode(tmp_path / "a.png", 8)


def test_links_that_form_cycles_and_pipes_among_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(3):
        (tmp_path / "a" / f"link{number}").symlink_to("..")
    with pytest.raises(KeelError, match="is linked more than 1,000 times"):
        list(images.image_files(tmp_path))
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "pipe.png")
    with pytest.raises(KeelError, match=r"pipe.png' is not a file"):
        list(images.image_files(tmp_path / "b"))


@pytest.mark.parametrize(
    ("image", "label", "message"),
    [
        ("../../../outside", "1", r"image_id must be letters, digits, '_' and '-' \(got '../../../outside'\)"),
        ("x" * 5000, "1", "image_id must be letters, digits"),
        ("abcd", "9" * 5000, r"the class must be from 0 to 3 \(got '9999"),
    ],
    ids=["escape", "long", "digits"],
)
def test_an_image_list_names_files_of_its_folder(
    image: str, label: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path / "data"))
    for name, content in landmark_files().items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(content)
    (tmp_path / "outside.jpg").write_bytes(picture("JPEG"))
    (tmp_path / "data" / SPLIT.folder / "test.csv").write_text(f"image_id,class\n{image},{label}\n")
    with pytest.raises(KeelError, match=message) as error:
        landmarks.load(SPLIT, 8, True)
    assert len(str(error.value)) < 500


def test_links_and_large_declarations_in_hdf5_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    refused: list[Any] = [fill for fill in HDF5 if fill is not HDF5[-1]]
    for number, fill in enumerate(refused):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            fill(file.create_group("examples/01"))
        with pytest.raises(KeelError, match="is damaged or not TFF's Stack Overflow"):
            print(number, list(stackoverflow.read(tmp_path / "a.h5")))


def test_a_text_in_hdf5_that_states_a_wrong_length_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        tokens = file.create_dataset("examples/01/tokens", data=["a b"], dtype=h5py.string_dtype())
        offset = tokens.id.get_offset()
    content = bytearray((tmp_path / "a.h5").read_bytes())
    content[offset : offset + 4] = struct.pack("<I", 2**31)
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(KeelError, match="must have up to 268,435,456 bytes of text"):
        list(stackoverflow.read(tmp_path / "a.h5"))


def test_pixels_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    for pixel, message in (10**400, "got other values"), (float("inf"), r"got inf\)"):
        with pytest.raises(KeelError, match=message):
            femnist.images([[pixel] * 784], [1], tmp_path)


def test_errors_about_leaf_files_are_short(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff" * 10_000)
    with pytest.raises(KeelError, match="UnicodeDecodeError") as error:
        list(leaf.read(tmp_path / "a.json"))
    assert len(str(error.value)) < 500
    with pytest.raises(KeelError, match="must have x of 80 characters") as error:
        shakespeare.samples(["x" * 10_000], ["y"], tmp_path)
    assert len(str(error.value)) < 500


def test_a_text_without_plays_has_no_roles() -> None:
    assert shakespeare.roles("nothing\nby William Shakespeare\n") == {}


@pytest.mark.parametrize("read", [text.read, lambda file: store.check(file, "md5:0"), shakespeare.read])
def test_a_folder_in_place_of_a_file_is_refused(read: Any, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"cannot be read|is damaged"):
        read(tmp_path)


def test_a_pickle_that_would_allocate_gigabytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(b"\x80\x02]r\xff\xff\xff\x0f.")  # stores the list as object 268,435,455
    with pytest.raises(KeelError, match="stores more objects than it has bytes"):
        cifar.read_pickle(tmp_path / "batch")


@pytest.mark.parametrize("change", [(b'"words": 12', b'"words": 13'), (b'"train"', b'"brain"'), (b"facts", b"fact")])
def test_a_changed_list_of_prepared_arrays_is_refused(change: tuple[bytes, bytes], tmp_path: Path) -> None:
    def make(folder: Path) -> dict[str, Any]:
        np.save(folder / "train.npy", np.arange(6))
        return {"words": 12}

    store._make(tmp_path / "set", make)
    file = tmp_path / "set" / "contents.json"
    file.write_bytes(file.read_bytes().replace(*change))
    with pytest.raises(KeelError, match="set' is damaged"):
        store._open(tmp_path / "set")


def test_an_archive_that_cannot_be_read_or_has_links_is_refused(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("set/train")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    for content, message in (packed.getvalue(), "has no file 'set/train'"), (b"no archive", "cannot be read"):
        (tmp_path / "set.tar.gz").write_bytes(content)
        download = Download("http://127.0.0.1:9", f"sha256:{sha256(content).hexdigest()}", "set.tar.gz", ("set/train",))
        with pytest.raises(KeelError, match=message):
            fetch(download, tmp_path, lambda *_: None)
    assert not (tmp_path / "set/train").exists()
