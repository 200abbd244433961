"""Settings of glibc's memory allocator."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def tune() -> None:
    """Make glibc reuse the memory of large tensors, instead of mapping fresh pages that fault in at every step.

    For worker processes that Keel started: the setting affects the whole process and cannot be undone. Other C
    libraries are left as they are.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version"):
            library.mallopt(M_MMAP_MAX, 0)
            library.mallopt(M_TRIM_THRESHOLD, -1)
