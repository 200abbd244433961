"""The contract suite: what every algorithm has to satisfy, for your own algorithms too.

    pytest --pyargs keel.testing --algorithm mine:FedExP

Without --algorithm it runs on every built-in algorithm.
"""
