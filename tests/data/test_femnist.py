import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel import KeelError
from keel.data import catalog, femnist
from keel.data.femnist import images
from keel.data.partition import partition_dataset


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEEL_DATA", str(tmp_path))
    write(tmp_path, "test", 0, {"f0001_00": random_images(1), "f0002_00": random_images(2)})
    return tmp_path


def random_images(images: int, seed: int = 0) -> dict[str, Any]:
    """Draw a writer's images in LEAF's format."""
    stream = np.random.default_rng(seed)
    pixels = stream.integers(0, 256, size=(images, 784))
    return {"x": (pixels / 255).tolist(), "y": stream.integers(0, 62, images).tolist()}


def write(data: Path, part: str, shard: int, user_data: dict[str, Any]) -> Path:
    file = data / "femnist" / part / f"all_data_{shard}_niid_0_keep_0_{part}_9.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    counts = [len(samples["y"]) for samples in user_data.values()]
    file.write_text(json.dumps({"users": [*user_data], "num_samples": counts, "user_data": user_data}))
    return file


def test_images_of_all_files_are_read_with_their_writers(data: Path) -> None:
    writers = {"f0001_00": random_images(3, 1), "f0002_00": random_images(1, 2), "f0003_00": random_images(2, 3)}
    write(data, "train", 0, {"f0001_00": writers["f0001_00"], "f0002_00": writers["f0002_00"]})
    write(data, "train", 1, {"f0003_00": writers["f0003_00"]})
    dataset = catalog.load("femnist", {})
    assert dataset.keys is not None
    assert dataset.keys.tolist() == [0, 0, 0, 1, 2, 2]
    x = [image for samples in writers.values() for image in samples["x"]]
    assert dataset.train.inputs.shape == (6, 1, 28, 28)
    np.testing.assert_array_equal(dataset.train.inputs.flatten(1), np.rint(np.array(x) * 255))
    assert dataset.train.targets.tolist() == [label for samples in writers.values() for label in samples["y"]]
    federated = partition_dataset("femnist", dataset, 0, "key")
    assert federated.partition.sizes.tolist() == [3, 1, 2]
    assert len(federated.test) == 3
    assert federated.input_shape == (1, 28, 28)


def test_classes_are_digits_then_capital_then_small_letters(data: Path) -> None:
    for part in ("train", "test"):
        write(data, part, 0, {"ann": random_images(3)})
    names = catalog.load("femnist", {}).class_names
    assert [names[label] for label in (0, 9, 10, 35, 36, 61)] == ["0", "9", "A", "Z", "a", "z"]


def test_pixels_are_converted_to_bytes_without_loss() -> None:
    pixels = np.arange(784) % 256
    found, _ = images([(pixels / 255).tolist()], [5], Path("f"))
    assert found.dtype == np.uint8
    assert found.flatten().tolist() == pixels.tolist()


white = [1.0] * 784


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ({"x": [white], "y": [62]}, "must have labels from 0 to 61 .got 62."),
        ({"x": [white], "y": [-1]}, "must have labels from 0 to 61 .got -1."),
        ({"x": [white], "y": ["A"]}, "must have labels from 0 to 61 .got 'A'."),
        ({"x": [white], "y": [1.5]}, "must have labels from 0 to 61 .got 1.5."),
        ({"x": [white[:-1]], "y": [1]}, "must have 784 numbers per image"),
        ({"x": [white, white[:-1]], "y": [1, 1]}, "must have 784 numbers per image"),
        ({"x": [["white"] * 784], "y": [1]}, "must have 784 numbers per image"),
        ({"x": [[0.5, *white[1:]]], "y": [1]}, "must have pixels k/255 .* .got 0.5."),
        ({"x": [[2.0, *white[1:]]], "y": [1]}, "must have pixels k/255 .* .got 2.0."),
        ({"x": [[float("nan"), *white[1:]]], "y": [1]}, "must have pixels k/255 .* .got nan."),
        ({"x": [white, white], "y": [1]}, "the user 'f0001_00' in .* must have lists x and y of equal length"),
        ({"x": "white", "y": [1] * 5}, "the user 'f0001_00' in .* must have lists x and y of equal length"),
        ({"x": [], "y": []}, "must have 784 numbers per image"),
        ({"x": [white], "labels": [1]}, "not in LEAF's format .KeyError.'y'"),
    ],
)
def test_invalid_images_or_labels_are_refused_with_the_file(data: Path, samples: dict[str, Any], words: str) -> None:
    file = data / "femnist" / "train" / "all_data_7.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"user_data": {"f0001_00": samples}}))
    with pytest.raises(KeelError, match=words) as refused:
        catalog.load("femnist", {})
    assert str(file) in str(refused.value)
    assert [path for path in (data / "prepared").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"user_data": []}', b"\xff\xfe", b"[" * 100_000])
def test_a_file_in_another_format_is_refused(data: Path, content: bytes) -> None:
    write(data, "train", 0, {"f0001_00": random_images(1)})
    file = data / "femnist" / "train" / "all_data_1.json"
    file.write_bytes(content)
    with pytest.raises(KeelError, match=r"all_data_1.json' is damaged or not in LEAF's format"):
        femnist.femnist()


def test_a_truncated_file_and_one_without_users_are_refused(data: Path) -> None:
    file = write(data, "train", 0, {"f0001_00": random_images(4)})
    file.write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(KeelError, match="is damaged or not in LEAF's format"):
        femnist.femnist()
    write(data, "train", 0, {})
    with pytest.raises(KeelError, match="train' has no users"):
        femnist.femnist()


def test_the_error_for_missing_files_names_their_source(data: Path) -> None:
    with pytest.raises(KeelError, match=r"femnist/train/\*.json', which does not exist; copy it there from .*leaf"):
        catalog.load("femnist", {})


def test_leaf_files_have_the_expected_statistics() -> None:
    folder = os.environ.get("KEEL_DATA")
    if folder is None or not any(Path(folder).glob("femnist/train/*.json")):
        pytest.skip("requires LEAF's femnist/train/*.json in KEEL_DATA")
    dataset = femnist.femnist()
    assert dataset.keys is not None
    if len(np.unique(dataset.keys)) == 105:  # LEAF's sample (niid, 0.05) without its larger files
        assert (len(dataset.train), len(dataset.test)) == (14_708, 1_685)
    prepared = dataset.transform(dataset.train.inputs[::7])
    assert abs(prepared.mean()) < 0.1
    assert abs(prepared.std() - 1) < 0.1
    assert np.unique(dataset.train.targets).tolist() == list(range(62))
