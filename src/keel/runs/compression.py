"""Makes the codecs of a spec's `[compression]` table."""

import torch

from keel.algorithms import messages_of
from keel.compression.codecs import Codec, Int4, Int8, RandomK, Sign, TopK
from keel.compression.mechanism import Compression, Downlink
from keel.config.compression import FRACTION, CompressionSpec
from keel.config.schema import Spec
from keel.core.flat_model import FlatModel
from keel.core.mechanisms import Mechanisms
from keel.core.task import Task
from keel.core.torch_randomness import keyed_torch_rng


def compression_of(spec: Spec, task: Task) -> tuple[Mechanisms, Downlink | None]:
    """What encodes the reports of clients, and the broadcasts."""
    table = spec.compression
    if table is None:
        return Mechanisms(), None
    downlink = None if table.down is None else Downlink(_codec(table.down, table, unbiased=True))
    if table.up is None:
        return Mechanisms(), downlink
    model = FlatModel(task.module, task.moving)
    with keyed_torch_rng(spec.seed, "trial"):
        _, up = messages_of(spec.algorithm, torch.zeros_like(model.weights), model.sizes)
    report = _codec(table.up, table, unbiased=not table.feeds_back)
    probe = _codec(table.up, table, unbiased=True)
    compression = Compression(report, probe, {"probe": up[0], "report": up[-1]}, table.feeds_back)
    return Mechanisms((compression,)), downlink


def _codec(name: str, table: CompressionSpec, unbiased: bool) -> Codec:
    fraction = FRACTION if table.fraction is None else table.fraction
    codecs: dict[str, Codec] = {
        "top_k": TopK(fraction),
        "random_k": RandomK(fraction, unbiased),
        "int8": Int8(),
        "int4": Int4(),
        "sign": Sign(),
    }
    return codecs[name]
