"""Overlay: two handwritten digits over each other, and both are asked for."""

from functools import lru_cache
from typing import Annotated

from einops import rearrange
from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.tasks._digits import load_digits
from gradsurg.tasks._generated import Count, Seed
from gradsurg.tasks._overlays import Pool, TwoDigits, overlaid
from gradsurg.tasks._tables import split
from gradsurg.tasks.base import Data

SIDE = 8


@validated
class Overlay(TwoDigits):
    """Classify two of scikit-learn's digits at once (as MultiMNIST, Sabour et al. 2017).

    One digit lies at the top left of a larger image, the other `shift` pixels further down and to
    the right; where they overlap the brighter pixel counts. The 20 outputs are ten for the first
    digit, then ten for the second; the loss is the sum of their cross-entropies, and the accuracy
    the mean of theirs. Digits of the test are in no training image. The split depends on
    `split_seed`, the pairs on `data_seed` alone.
    """

    num_train: Count = 8000
    num_test: Count = 1000
    shift: Annotated[int, Field(ge=0, le=SIDE)] = 4
    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.25
    split_seed: Seed = 0
    data_seed: Seed = 0

    def load(self) -> Data:
        return _data(self).copy()


@lru_cache(maxsize=2)
def _data(task: Overlay) -> Data:
    pixels, labels = load_digits()
    images = rearrange(pixels, "digit (y x) -> digit y x", y=SIDE) / 16
    train, test = split(labels, task.test_fraction, task.split_seed, stratify=True)
    pools = [
        Pool(images[train], labels[train], task.num_train),
        Pool(images[test], labels[test], task.num_test),
    ]
    return overlaid(pools, task.shift, task.data_seed)
