"""Write src/keel/data/digits.npz from scikit-learn's copy of the UCI optical digits.

pip install scikit-learn && python tools/make_digits.py
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).parents[1] / "src/keel/data/digits.npz"

digits = load_digits()
np.savez_compressed(
    TARGET,
    images=digits.images.astype(np.uint8),  # (1797, 8, 8), values from 0 to 16
    labels=digits.target.astype(np.uint8),
)
print(f"{TARGET.name}: {len(digits.target)} images, {TARGET.stat().st_size:,} bytes")
