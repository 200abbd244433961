"""The largest stable step of the two versions of GHBM on a quadratic, from the eigenvalues of their linear recursions.

One local step, all clients alike, curvature h. Both steps are in the same unit: the distance that the server moves in a
round along a constant gradient of length one, times h. For the theory version this is eta h; for the practical version,
which sums, l h / (1 - beta'), where beta' = 1 - beta is its weight of the momentum.
"""

from collections.abc import Callable

import numpy as np

Matrix = Callable[[float, int, float], np.ndarray]
"""The companion matrix for a step, tau, and the weight of the gradient, beta."""


def theory_matrix(step: float, tau: int, beta: float) -> np.ndarray:
    """Return the matrix that maps (theta^{t-1}, ..., theta^{t-tau}, m^t) to the same one round later.

    m^{t+1} = (1 - beta) m^t + beta / tau (g(theta^{t-1}) + ... + g(theta^{t-tau}))
    theta^t = theta^{t-1} - eta m^{t+1}
    """
    matrix = np.eye(tau + 1, k=-1)
    matrix[-1] = [*[beta / tau] * tau, 1 - beta]
    matrix[0] = -step * matrix[-1]
    matrix[0, 0] += 1
    return matrix


def practical_matrix(step: float, tau: int, beta: float) -> np.ndarray:
    """Return the matrix that maps (theta^{t-1}, ..., theta^{t-tau-1}) to the same one round later."""
    matrix = np.eye(tau + 1, k=-1)
    matrix[0, 0] = 1 - beta * step + (1 - beta) / tau
    matrix[0, -1] -= (1 - beta) / tau
    return matrix


def spectral_radius(matrix: np.ndarray) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def largest_step(matrix: Matrix, tau: int, beta: float) -> float:
    """Return the step up to which no mode grows, by bisection.

    No version is stable beyond the limit of classical momentum, 2 (2 - beta) / beta.
    """
    low, high = 0.0, 2.1 * (2 - beta) / beta
    for _ in range(60):
        middle = (low + high) / 2
        if spectral_radius(matrix(middle, tau, beta)) > 1:
            high = middle
        else:
            low = middle
    return low


def theory_limit(tau: int, beta: float) -> float:
    """Return the largest stable server step of `ghbm_theory`, times the curvature."""
    return largest_step(theory_matrix, tau, beta)


def practical_limit(tau: int, beta: float) -> float:
    """Return the largest stable step of `ghbm` with the momentum weight 1 - beta, times the curvature."""
    return largest_step(practical_matrix, tau, beta)
