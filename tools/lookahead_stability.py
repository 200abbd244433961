"""Print the linear stability of GHBM with a lookahead, the table of docs/algorithms/ghbm_lookahead.md.

    python tools/lookahead_stability.py

On a quadratic, one round of local training covers a constant part of the distance to the minimum. h is this part times
the server learning rate, and a round is

    theta^{t+1} = (1 - h) theta^t + (beta / tau - h lookahead) (theta^t - theta^{t-tau})
"""

import numpy as np

BETA = 0.9
TAUS = (10, 25, 50)
LOOKAHEADS = (0.0, 0.25, 0.5, 1.0, 2.0)
SLOW, FAST = 0.01, 0.1
"""The two h for which the table has the rounds and the variance."""
ROUNDS = 5000
"""The rounds over which the response to a disturbance is summed."""


def coefficients(h: float, tau: int, lookahead: float, beta: float = BETA) -> tuple[float, float]:
    """Return the factors of theta^t and theta^{t-tau} in theta^{t+1}."""
    momentum = beta / tau - h * lookahead
    return 1 - h + momentum, -momentum


def spectral_radius(h: float, tau: int, lookahead: float, beta: float = BETA) -> float:
    """Return the factor by which a round multiplies the slowest mode."""
    present, past = coefficients(h, tau, lookahead, beta)
    return float(abs(np.roots([1.0, -present, *[0.0] * (tau - 1), -past])).max())


def limit(tau: int, lookahead: float, beta: float = BETA) -> float:
    """Return the largest stable h, by bisection: it is at most 2 + 2 beta / tau."""
    low, high = 0.0, 4.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if spectral_radius(middle, tau, lookahead, beta) < 1 else (low, middle)
    return low


def rounds_per_e(h: float, tau: int, lookahead: float, beta: float = BETA) -> float:
    """Return the rounds in which the distance to the minimum falls by the factor e."""
    return float(-1 / np.log(spectral_radius(h, tau, lookahead, beta)))


def variance(h: float, tau: int, lookahead: float, beta: float = BETA) -> float:
    """Return the stationary variance of theta under noise of variance 1 in every round, as of a sampled cohort."""
    present, past = coefficients(h, tau, lookahead, beta)
    response = [0.0] * tau + [1.0]
    for _ in range(ROUNDS):
        response.append(present * response[-1] + past * response[-1 - tau])
    return sum(value**2 for value in response)


def table() -> str:
    """Return the Markdown table."""
    lines = [
        f"| tau | lookahead | largest stable h | rounds per factor e, h = {SLOW} | h = {FAST} "
        f"| variance, h = {SLOW} | h = {FAST} |",
        "|---|---|---|---|---|---|---|",
    ]
    for tau in TAUS:
        for lookahead in LOOKAHEADS:
            rounds = [f"{rounds_per_e(h, tau, lookahead):.0f}" for h in (SLOW, FAST)]
            noise = [f"{variance(SLOW, tau, lookahead):.0f}", f"{variance(FAST, tau, lookahead):.1f}"]
            cells = [str(tau), str(lookahead), f"{limit(tau, lookahead):.2f}", *rounds, *noise]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
