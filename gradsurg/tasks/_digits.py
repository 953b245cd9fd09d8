"""The file of digits that scikit-learn ships, read without it."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

NUM_DIGITS, NUM_PIXELS = 1797, 64


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (N, 64) from 0 to 16 and labels, as scikit-learn's own reader gives them.

    That one takes a second, for it needs all of scikit-learn and SciPy. Raises FileNotFoundError if
    the file is not where it was.
    """
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the digits come with scikit-learn, which is not installed")
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    if table.shape != (NUM_DIGITS, NUM_PIXELS + 1):
        shape = f"{NUM_DIGITS} x {NUM_PIXELS + 1}"
        raise ValueError(f"{file}: must have {shape} numbers, found {table.shape}")
    return table[:, :-1], table[:, -1].astype(np.int64)
