"""safetensors files in which every tensor has a checksum."""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that a file can hold, and safetensors' names of them."""
_SUMS, _SUM = "tensors_sha256", "metadata_sha256"


def checked_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file in parts, with the checksums of its tensors and of its metadata in the metadata."""
    sums = json.dumps({name: tensor_sum(name, tensor) for name, tensor in tensors.items()})
    whole = {**metadata, _SUMS: sums}
    return safetensors_parts(tensors, {**whole, _SUM: _metadata_sum(whole)})


def read_checked(
    file: Path, prefix: str | tuple[str, ...] = "", required: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors whose names begin with `prefix`, and the metadata.

    Args:
        required: Whether a file without checksums, as earlier versions wrote it, is refused.

    Raises:
        ValueError: The file is not what was written.
    """
    if file.exists() and not file.is_file():  # a pipe would block
        raise ValueError("it is not a regular file")
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata() or {}
            names = set(content.keys())
            sums = _checked_sums(metadata, names, required)
            # copied: the rounding of some operations depends on how their operands are aligned in memory
            tensors = {name: content.get_tensor(name).clone() for name in sorted(names) if name.startswith(prefix)}
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    except RuntimeError:  # PyTorch cannot open the file: Python's error says why
        with file.open("rb"):
            raise
    for name, tensor in tensors.items():
        if sums is not None and sums[name] != tensor_sum(name, tensor):
            raise ValueError(f"the checksum of tensor {name!r} is wrong")
    return tensors, {key: value for key, value in metadata.items() if key not in (_SUMS, _SUM)}


def has_checksums(file: Path) -> bool:
    """Whether a safetensors file has the checksums of its tensors."""
    with safe_open(file, framework="pt") as content:
        return _SUM in (content.metadata() or {})


def _checked_sums(metadata: dict[str, str], names: set[str], required: bool) -> dict[str, str] | None:
    """The checksum of each tensor; None in a file without checksums."""
    if not required and not {_SUMS, _SUM} & metadata.keys():
        return None
    if metadata.get(_SUM) != _metadata_sum({key: value for key, value in metadata.items() if key != _SUM}):
        raise ValueError("the checksum of its metadata is wrong")
    sums: dict[str, str] = json.loads(metadata[_SUMS])
    if sums.keys() != names:
        raise ValueError("a tensor is missing")
    return sums


def _metadata_sum(metadata: Mapping[str, str]) -> str:
    return sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def tensor_sum(name: str, tensor: Tensor) -> str:
    """The checksum of a tensor's name, dtype, shape and bytes."""
    digest = sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(_raw(tensor))
    return digest.hexdigest()


def safetensors_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file in parts, one tensor after the other: the library would copy all of them into RAM.

    The length of the header comes first, then the header as JSON, then the tensors: the widest dtypes first, so that
    each is aligned.
    """
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield _raw(tensor)


def _raw(tensor: Tensor) -> memoryview:
    if not tensor.numel():  # an empty tensor may have a stride that forbids the view
        return memoryview(b"")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
