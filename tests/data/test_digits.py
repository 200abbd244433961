import numpy as np

from keel.data import digits


def test_all_embedded_digits_are_loaded() -> None:
    dataset = digits.digits()
    train, test = dataset.train, dataset.test
    assert (len(train), len(test)) == (1500, 297)
    assert train.inputs.shape == (1500, 64)
    assert train.inputs.min() == 0
    assert train.inputs.max() == 1
    counts = np.bincount(train.targets) + np.bincount(test.targets)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
