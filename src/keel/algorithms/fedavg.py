"""Federated averaging.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas. Communication-Efficient Learning of Deep
Networks from Decentralized Data. AISTATS 2017.
"""

from keel.algorithms.base import Algorithm, hyperparameters


@hyperparameters
class FedAvg(Algorithm):
    """Clients run SGD from the server's model; the server applies the mean of their updates.

    client:  u = g
    server:  theta <- theta - eta mean(theta - w_i)
    """

    name = "fedavg"
    title = "FedAvg"
    paper = "McMahan et al., AISTATS 2017"
    mean_suffices = True
