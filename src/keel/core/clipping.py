"""Clips the reports of a round in Euclidean norm, so that no client moves the server's model arbitrarily far.

The threshold is a number, or "adaptive": FACTOR times the median of the norms of this cohort and of the last WINDOW
rounds. The median is the lower one, which in a cohort of two is the smaller norm. It lies between honest norms whenever
less than half of the norms are not honest; of two norms it may be the malicious one. Norms are recorded as clipped, so
that a majority for some rounds raises the threshold step by step and not in one round.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import fsum, inf, isfinite, sqrt

import torch
from torch import Tensor

from keel.algorithms.base import Message
from keel.core.choices import Clip
from keel.core.client import ClientResult
from keel.core.training_state import BUFFERS

FACTOR = 3.0
"""The adaptive threshold relative to the median."""
WINDOW = 10
"""Earlier rounds whose norms enter the median."""
CHUNK = 1 << 20
"""Elements that are converted to double precision at a time."""


def euclidean_norm(tensor: Tensor) -> float:
    """The norm in double precision. Parts are copied, so that it does not depend on the alignment of the memory."""
    return sqrt(fsum(float(part.double().square().sum()) for part in torch.split(tensor.reshape(-1), CHUNK)))


def adaptive_threshold(norms: Iterable[float]) -> float:
    """FACTOR times the lower median of the positive, finite norms; infinite if there are none."""
    ordered = sorted(norm for norm in norms if 0 < norm < inf)
    return FACTOR * ordered[(len(ordered) - 1) // 2] if ordered else inf


class RoundClipping:
    """Clips the messages of one round, each tensor by its own threshold.

    A number is the threshold of large tensors: those with more elements than the model has parameter tensors, so not of
    counts and block-wise statistics. "adaptive" applies to every floating-point tensor. A tensor that is not finite
    stays as it is: the run diverges as without clipping.

    Args:
        blocks: The number of the model's parameter tensors.
        recorded: The norms of earlier rounds, as `recorded` holds them after a round.
    """

    def __init__(self, clip: Clip, round: int, blocks: int, recorded: Mapping[str, Tensor]):
        self.clip, self.round, self.blocks = clip, round, blocks
        self.recorded = {name: rows[rows[:, 0] >= round - WINDOW] for name, rows in recorded.items()}
        """By the name of a tensor, a row per report: the round and the clipped norm."""
        self.norms: dict[int, float] = {}
        """Each client's norm over the large tensors of its report, before clipping."""
        self.clipped: set[int] = set()

    def probes(self, cohort: Sequence[int], messages: Iterable[Message]) -> Iterator[Message]:
        """The clipped messages of the first phase. All are read first."""
        held = [{f"probe.{name}": value for name, value in message.items()} for message in messages]
        for message, scales in zip(held, self._scales(cohort, held), strict=True):
            yield {name.removeprefix("probe."): value for name, value in _scaled(message, scales).items()}

    def results(
        self, cohort: Sequence[int], results: Iterable[ClientResult], buffers: Tensor | None
    ) -> Iterator[ClientResult]:
        """The results with clipped messages. All are read first, and held without their client states.

        Args:
            buffers: Those that the server sent, if it averages buffers. Their change is clipped like a tensor of the
                message.
        """
        held = [replace(result, state={}) for result in results]
        reports: list[Message] = []
        for client, result in zip(cohort, held, strict=True):
            large = [euclidean_norm(value) for value in result.message.values() if self._is_large(value)]
            self.norms[client] = sqrt(fsum(norm**2 for norm in large))
            change = {} if buffers is None or result.buffers is None else {BUFFERS: result.buffers - buffers}
            reports.append({**result.message, **change})
        for result, report, scales in zip(held, reports, self._scales(cohort, reports), strict=True):
            moved = result.buffers
            if buffers is not None and BUFFERS in scales:
                moved = buffers + scales[BUFFERS] * report[BUFFERS]
            yield replace(result, message=_scaled(result.message, scales), buffers=moved)

    def _scales(self, cohort: Sequence[int], messages: Sequence[Message]) -> list[dict[str, float]]:
        """For each message, the factors below one of the tensors that are clipped."""
        scales: list[dict[str, float]] = [{} for _ in messages]
        for name in messages[0]:
            if not self._applies(messages[0][name]):
                continue
            norms = [euclidean_norm(message[name]) for message in messages]
            threshold = self._threshold(name, norms)
            for client, norm, scale in zip(cohort, norms, scales, strict=True):
                if threshold < norm < inf:
                    scale[name] = threshold / norm
                    self.clipped.add(client)
        return scales

    def _threshold(self, name: str, norms: list[float]) -> float:
        """The threshold of this round's tensors of a name, whose norms are recorded."""
        if self.clip != "adaptive":
            return self.clip
        before = self.recorded.get(name, torch.zeros(0, 2, dtype=torch.float64))
        threshold = adaptive_threshold([*before[:, 1].tolist(), *norms])
        new = [[self.round, min(norm, threshold)] for norm in norms if isfinite(norm)]
        self.recorded[name] = torch.cat([before, torch.tensor(new, dtype=torch.float64).reshape(-1, 2)])
        return threshold

    def _applies(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() if self.clip == "adaptive" else self._is_large(tensor)

    def _is_large(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.numel() > self.blocks


def _scaled(message: Message, scales: Mapping[str, float]) -> Message:
    return {name: value * scales[name] if name in scales else value for name, value in message.items()}
