import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel import KeelError
from keel.data import catalog, femnist
from keel.data.femnist import images
from keel.data.partition import deal_out


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    write(tmp_path, "test", 0, {"f0001_00": drawn(1), "f0002_00": drawn(2)})
    return tmp_path


def drawn(images: int, seed: int = 0) -> dict[str, Any]:
    """A writer's images in LEAF's form."""
    stream = np.random.default_rng(seed)
    pixels = stream.integers(0, 256, size=(images, 784))
    return {"x": (pixels / 255).tolist(), "y": stream.integers(0, 62, images).tolist()}


def write(data: Path, part: str, shard: int, user_data: dict[str, Any]) -> Path:
    file = data / "femnist" / part / f"all_data_{shard}_niid_0_keep_0_{part}_9.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    samples = [len(held["y"]) for held in user_data.values()]
    file.write_text(json.dumps({"users": [*user_data], "num_samples": samples, "user_data": user_data}))
    return file


def test_the_images_of_all_files_with_their_writers(data: Path) -> None:
    writers = {"f0001_00": drawn(3, 1), "f0002_00": drawn(1, 2), "f0003_00": drawn(2, 3)}
    write(data, "train", 0, {"f0001_00": writers["f0001_00"], "f0002_00": writers["f0002_00"]})
    write(data, "train", 1, {"f0003_00": writers["f0003_00"]})
    pool = catalog.load("femnist", {})
    assert pool.keys is not None
    assert pool.keys.tolist() == [0, 0, 0, 1, 2, 2]
    x = [image for held in writers.values() for image in held["x"]]
    assert pool.train.inputs.shape == (6, 1, 28, 28)
    np.testing.assert_array_equal(pool.train.inputs.flatten(1), np.rint(np.array(x) * 255))
    assert pool.train.targets.tolist() == [label for held in writers.values() for label in held["y"]]
    dealt = deal_out("femnist", pool, 0, "key")
    assert dealt.partition.sizes.tolist() == [3, 1, 2]
    assert len(dealt.test) == 3
    assert dealt.input_shape == (1, 28, 28)


def test_every_byte_comes_back() -> None:
    pixels = np.arange(784) % 256
    found, _ = images([(pixels / 255).tolist()], [5], Path("f"))
    assert found.dtype == np.uint8
    assert found.flatten().tolist() == pixels.tolist()


white = [1.0] * 784


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"x": [white], "y": [62]}, "other labels; accepted: whole numbers from 0 to 61"),
        ({"x": [white], "y": [-1]}, "other labels"),
        ({"x": [white], "y": ["A"]}, "other labels"),
        ({"x": [white], "y": [1.5]}, "other labels"),
        ({"x": [white[:-1]], "y": [1]}, "another size; accepted: 784 numbers each"),
        ({"x": [white, white[:-1]], "y": [1, 1]}, "something else than numbers; accepted: 784 an image"),
        ({"x": [["white"] * 784], "y": [1]}, "something else than numbers"),
        ({"x": [[0.5, *white[1:]]], "y": [1]}, "greys that are no bytes; accepted: k/255"),
        ({"x": [[2.0, *white[1:]]], "y": [1]}, "greys that are no bytes"),
        ({"x": [[float("nan"), *white[1:]]], "y": [1]}, "greys that are no bytes"),
        ({"x": [white, white], "y": [1]}, "a user without as many x as y"),
        ({"x": "white", "y": [1] * 5}, "a user without as many x as y"),
        ({"x": [], "y": []}, "another size"),
        ({"x": [white], "labels": [1]}, "not LEAF's json .KeyError.'y'"),
    ],
)
def test_what_is_not_femnist_is_refused_with_the_file(data: Path, held: dict[str, Any], words: str) -> None:
    file = data / "femnist" / "train" / "all_data_7.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"user_data": {"f0001_00": held}}))
    with pytest.raises(KeelError, match=words) as refused:
        catalog.load("femnist", {})
    assert str(file) in str(refused.value)
    assert [path for path in (data / "prepared").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"user_data": []}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_not_leaf_s_json_is_refused_with_the_file(data: Path, content: bytes) -> None:
    write(data, "train", 0, {"f0001_00": drawn(1)})
    file = data / "femnist" / "train" / "all_data_1.json"
    file.write_bytes(content)
    with pytest.raises(KeelError, match=r"all_data_1.json' is damaged or not LEAF's json"):
        femnist.femnist()


def test_a_truncated_file_and_one_without_users_are_refused(data: Path) -> None:
    file = write(data, "train", 0, {"f0001_00": drawn(4)})
    file.write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(KeelError, match="is damaged or not LEAF's json"):
        femnist.femnist()
    write(data, "train", 0, {})
    with pytest.raises(KeelError, match="train' holds no user"):
        femnist.femnist()


def test_the_files_are_asked_for(data: Path) -> None:
    with pytest.raises(KeelError, match=r"femnist/train/\*.json', which is not there; accepted: .*leaf"):
        catalog.load("femnist", {})


def test_leaf_s_own_files() -> None:
    folder = os.environ.get("KEEL_DATA")
    if folder is None or not any(Path(folder).glob("femnist/train/*.json")):
        pytest.skip("needs LEAF's femnist/train/*.json in KEEL_DATA")
    pool = femnist.femnist()
    assert pool.keys is not None
    if len(np.unique(pool.keys)) == 105:  # LEAF's sample (niid, 0.05) without its larger files
        assert (len(pool.train), len(pool.test)) == (14_708, 1_685)
    prepared = pool.prepare(pool.train.inputs[::7])
    assert abs(prepared.mean()) < 0.1
    assert abs(prepared.std() - 1) < 0.1
    assert np.unique(pool.train.targets).tolist() == list(range(62))
