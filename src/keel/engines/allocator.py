"""The C library's allocator, told to keep what it has."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def tune() -> None:
    """Large tensors come from memory that was used before, instead of fresh pages that fault in at every step.

    For worker processes of our own: it holds for the whole process and cannot be undone. Elsewhere than with glibc
    nothing happens.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version"):
            library.mallopt(M_MMAP_MAX, 0)
            library.mallopt(M_TRIM_THRESHOLD, -1)
