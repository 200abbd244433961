"""The values that options of a run can have. A spec is checked against them before PyTorch is imported."""

from typing import Literal

BufferPolicy = Literal["average", "local", "group_norm"]
"""What becomes of buffers that training changes, see `buffers.py`."""

Precision = Literal["float32", "bfloat16", "float16"]
"""The precision of stored client states."""

Autocast = Literal["float32", "bf16"]
"""The precision of a model's forward and backward pass. Weights, gradients and losses are float32 in any case."""

Layout = Literal["contiguous", "channels_last"]
"""The memory format of image tensors, as in PyTorch: channel by channel, or pixel by pixel."""

Clip = float | Literal["adaptive"]
"""The largest Euclidean norm of a tensor that a client reports, or how it is learned, see `clipping.py`."""
