"""Hostile images, folders of images and lists of images."""

import os
import struct
import zlib
from pathlib import Path
from random import Random

from faults._dataset_readers import SPLIT
from faults._outside import OUTSIDE
from faults._small_files import picture


def large_png(width: int, height: int) -> bytes:
    """A small file that declares a large image."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(10_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n" + f"({OUTSIDE}/written) (w) file\n".encode()
)
PICTURES = (
    large_png(60_000, 60_000), large_png(12_000, 12_000), large_png(2**31 - 1, 1), large_png(0, 0), large_png(1,
    400_000),
    POSTSCRIPT, picture("GIF"), picture("TIFF"), picture("ICO"), picture("PPM"), b"", b"\xff\xd8\xff",
    b"RIFF\xff\xff\xff\xffWEBP",
    b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 2**30, -(2**30), 1, 24, 0, 0, 0, 0, 0, 0),
)  # fmt: skip


def odd_tree(rng: Random, folder: Path) -> None:
    """Links that form cycles, special files and odd names in the folder of images."""
    client = folder / "train" / "anna"
    kind = rng.randrange(6)
    if kind == 0:
        for number in range(4):
            (client / f"link{number}").symlink_to("..")
    elif kind == 1:
        (client / "link").symlink_to(".")
    elif kind == 2:
        os.mkfifo(client / "cat" / "pipe.png")
    elif kind == 3:
        (client / "cat" / "gone.png").symlink_to("nowhere")
    elif kind == 4:
        (client / "cat").rename(os.fsdecode(os.fsencode(client) + b"/\xff\n"))
    else:
        for depth in range(20):  # 2^20 paths
            (client / "cat" / f"d{depth}").mkdir()
            for side in "ab":
                (client / "cat" / f"d{depth}" / side).symlink_to(f"../d{depth + 1}")


def odd_image_list(rng: Random, folder: Path) -> None:
    image = rng.choice(
        (
            f"../../..{OUTSIDE}/secret",
            f"{OUTSIDE}/secret",
            os.path.relpath(OUTSIDE, folder / SPLIT.folder / SPLIT.images) + "/secret",
            "a\0b",
            "x" * 5000,
            "",
            ".",
            "..",
            "/",
            "0a1b/",
            "\ud7ff",
            "a\nb",
        )
    )
    label = rng.choice(("3", "9" * 5000, "²", "-1", "1.0", "٣", ""))
    rows = ["image_id,class", f'"{image}",{label}'] if rng.random() < 0.8 else [f'"{image}",class', "a,1"]
    (folder / SPLIT.folder / "test.csv").write_text("\n".join(rows), encoding="utf-8")
