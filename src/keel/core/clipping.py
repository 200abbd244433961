"""Clips the reports of a round in Euclidean norm, or rejects them: no client moves the server's model arbitrarily far.

The threshold is a number, or "adaptive": FACTOR times the median of the norms of this cohort and of the last WINDOW
rounds. The median is the lower one, which in a cohort of two is the smaller norm. It lies between honest norms whenever
less than half of the norms are not honest; of two norms it may be the malicious one. Norms are recorded as clipped, so
that a majority for some rounds raises the threshold step by step and not in one round.

With "adaptive", a report above REJECTED times the median is rejected: the client is dropped from the round, its norm
not recorded. Only fewer than half of a cohort are rejected. If more are so large, the norms of the training have
changed, or the median is a malicious client's, and all of them are clipped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum, inf, isfinite, sqrt

import torch
from torch import Tensor

from keel.algorithms.base import Message
from keel.core.choices import Clip
from keel.core.client import ClientResult
from keel.core.engine import Dropped
from keel.core.training_state import BUFFERS

FACTOR = 3.0
"""The adaptive threshold relative to the median."""
REJECTED = 100.0
"""The norm relative to the median above which a report is rejected: twice the largest of honest clients with one class
each (docs/poisoning.md)."""
WINDOW = 10
"""Earlier rounds whose norms enter the median."""
CHUNK = 1 << 20
"""Elements that are converted to double precision at a time."""


def euclidean_norm(tensor: Tensor) -> float:
    """The norm in double precision. Parts are copied, so that it does not depend on the alignment of the memory."""
    return sqrt(fsum(float(part.double().square().sum()) for part in torch.split(tensor.reshape(-1), CHUNK)))


def median_norm(norms: Iterable[float]) -> float:
    """The lower median of the positive, finite norms; infinite if there are none."""
    ordered = sorted(norm for norm in norms if 0 < norm < inf)
    return ordered[(len(ordered) - 1) // 2] if ordered else inf


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
        self.rejected: dict[int, Dropped] = {}
        """Why the reports or probes of these clients were rejected."""

    def probes(self, cohort: Sequence[int], messages: Iterable[Message]) -> list[Message]:
        """The clipped messages of the first phase, without those that are rejected."""
        held = [{f"probe.{name}": value for name, value in message.items()} for message in messages]
        return [
            {name.removeprefix("probe."): value for name, value in _scaled(held[row], scales).items()}
            for row, scales in self._scales(cohort, held).items()
        ]

    def results(
        self, cohort: Sequence[int], results: Iterable[ClientResult], buffers: Tensor | None
    ) -> list[ClientResult]:
        """The results with clipped messages, without those that are rejected.

        Args:
            buffers: Those that the server sent, if it averages buffers. Their change is clipped like a tensor of the
                message.
        """
        held = [_with_own_state(result) for result in results]
        reports: list[Message] = []
        for client, result in zip(cohort, held, strict=True):
            large = [euclidean_norm(value) for value in result.message.values() if self._is_large(value)]
            self.norms[client] = sqrt(fsum(norm**2 for norm in large))
            change = {} if buffers is None or result.buffers is None else {BUFFERS: result.buffers - buffers}
            reports.append({**result.message, **change})
        accepted = []
        for row, scales in self._scales(cohort, reports).items():
            moved = held[row].buffers
            if buffers is not None and BUFFERS in scales:
                moved = buffers + scales[BUFFERS] * reports[row][BUFFERS]
            accepted.append(replace(held[row], message=_scaled(held[row].message, scales), buffers=moved))
        return accepted

    def _scales(self, cohort: Sequence[int], messages: Sequence[Message]) -> dict[int, dict[str, float]]:
        """By the row of each accepted message, the factors below one of the tensors that are clipped."""
        names = [name for name, value in messages[0].items() if self._applies(value)]
        norms = {name: [euclidean_norm(message[name]) for message in messages] for name in names}
        large = [name for name in names if name != BUFFERS and self._is_large(messages[0][name])]
        far = self._far({name: norms[name] for name in large}) if self.clip == "adaptive" else {}
        rejected = far if 2 * len(far) < len(messages) else {}
        self.rejected |= {cohort[row]: reason for row, reason in rejected.items()}
        scales: dict[int, dict[str, float]] = {row: {} for row in range(len(messages)) if row not in rejected}
        for name in names:
            threshold = self._threshold(name, [norms[name][row] for row in scales])
            for row, scale in scales.items():
                if threshold < norms[name][row] < inf:
                    scale[name] = threshold / norms[name][row]
                    self.clipped.add(cohort[row])
        return scales

    def _far(self, norms: Mapping[str, Sequence[float]]) -> dict[int, Dropped]:
        """The rows with a norm far above the median of its tensor."""
        far: dict[int, Dropped] = {}
        for name, values in norms.items():
            median = median_norm([*self._before(name)[:, 1].tolist(), *values])
            for row, norm in enumerate(values):
                if REJECTED * median < norm < inf:
                    far[row] = Dropped(f"rejected: the norm of {name} is {norm:.3g}, the median is {median:.3g}")
        return far

    def _threshold(self, name: str, norms: Sequence[float]) -> float:
        """The threshold of this round's accepted tensors of a name, whose norms are recorded."""
        if self.clip != "adaptive":
            return self.clip
        before = self._before(name)
        threshold = FACTOR * median_norm([*before[:, 1].tolist(), *norms])
        new = [[self.round, min(norm, threshold)] for norm in norms if isfinite(norm)]
        self.recorded[name] = torch.cat([before, torch.tensor(new, dtype=torch.float64).reshape(-1, 2)])
        return threshold

    def _before(self, name: str) -> Tensor:
        """The recorded norms of a tensor."""
        return self.recorded.get(name, torch.zeros(0, 2, dtype=torch.float64))

    def _applies(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() if self.clip == "adaptive" else self._is_large(tensor)

    def _is_large(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.numel() > self.blocks


def _scaled(message: Message, scales: Mapping[str, float]) -> Message:
    return {name: value * scales[name] if name in scales else value for name, value in message.items()}


def _with_own_state(result: ClientResult) -> ClientResult:
    """The result with a copy of the client state, whose memory an engine may reuse for the next client."""
    return replace(result, state={name: value.clone() for name, value in result.state.items()})
