"""The digits and their split, which are scikit-learn's without importing it."""

import subprocess
import sys

import numpy as np
import pytest
from sklearn import datasets
from sklearn.model_selection import train_test_split

from gradsurg.tasks import digits
from gradsurg.tasks.data.arrays import split
from gradsurg.tasks.digits import load_digits

LABELS = {
    "digits": datasets.load_digits().target,
    "two classes": datasets.load_breast_cancer().target,
    "uneven classes": np.repeat(np.arange(4), [40, 3, 17, 90]),
}


def test_the_digits_are_those_of_scikit_learn():
    pixels, labels = load_digits()
    expected = datasets.load_digits()
    assert np.array_equal(pixels, expected.data)
    assert np.array_equal(labels, expected.target)


@pytest.mark.parametrize("stratify", [True, False])
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("name", LABELS)
def test_a_split_is_that_of_scikit_learn_row_for_row(name, fraction, stratify):
    labels = LABELS[name]
    rows = np.arange(len(labels))
    for seed in range(5):
        expected = train_test_split(
            rows, test_size=fraction, random_state=seed, stratify=labels if stratify else None
        )
        for found, wanted in zip(split(labels, fraction, seed, stratify), expected, strict=True):
            assert np.array_equal(found, wanted)


def test_loading_digits_does_not_import_scikit_learn():
    code = """
import sys
from gradsurg.tasks.digits import Digits
Digits().load()
print("sklearn" in sys.modules, "scipy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_scikit_learn_without_the_file_is_named(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="which is not installed"):
        load_digits()
