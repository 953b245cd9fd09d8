"""MNIST-1D: ten templates of twelve numbers each, stretched, moved, sheared and made noisy."""

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import Seed, draw_examples

NUM_CLASSES = 10
TEMPLATES = np.array(
    [
        [5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5],
        [5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5],
        [5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5],
        [5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5],
        [5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5],
        [5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5],
        [5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5],
        [5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5],
    ]
)
"""The digits as the paper draws them; each begins and ends at 5."""
SMOOTHING = 2.0  # the width of the filter that correlates noise, in steps
Amount = Annotated[float, Field(ge=0)]


@validated
class MNIST1D(Classification):
    """Classify the digits of Greydanus and Kobak 2024 (arXiv 2011.14439) by cross-entropy.

    A template is padded with zeros by a number in `padding`, brought to a common length, scaled,
    rolled by less than `max_translation` steps, given correlated noise where it is padded and
    white noise everywhere, tilted, and brought to `length`. Classes are equally frequent. The
    random generator differs, so examples are not those of the paper's file. Standardized by the
    mean and deviation in training; all depends on `data_seed` alone.
    """

    num_train: Annotated[int, Field(ge=NUM_CLASSES)] = 4000
    num_test: Annotated[int, Field(ge=1)] = 1000
    length: Annotated[int, Field(ge=2)] = 40
    padding: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (36, 60)
    scale: Amount = 0.4
    max_translation: Annotated[int, Field(ge=1)] = 48
    correlated_noise: Amount = 0.25
    white_noise: Amount = 0.02
    shear: Amount = 0.75
    data_seed: Seed = 0

    def __post_init__(self) -> None:
        low, high = self.padding
        if low > high:
            raise Contradiction("padding", f"needs low <= high, found low={low}, high={high}")

    def load(self) -> Data:
        return _data(self).copy()

    def draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return signals (count, length), not yet standardized, and classes."""
        from scipy.ndimage import gaussian_filter1d

        labels = generator.permutation(np.arange(count) % NUM_CLASSES)
        low, high = self.padding
        width = TEMPLATES.shape[1]
        padded = np.pad(_templates()[labels], [(0, 0), (0, high)])
        ends = width - 1 + generator.integers(low, high + 1, (count, 1))
        steps = np.arange(count)[:, None], np.linspace(0, 1, width + high) * ends
        signals = _between(padded, *steps)
        signals *= 1 + self.scale * (generator.random((count, 1)) - 0.5)
        inside = steps[1] < width
        shifts = generator.integers(0, self.max_translation, (count, 1))
        rolled = (np.arange(width + high) - shifts) % (width + high)
        signals, inside = signals[steps[0], rolled], inside[steps[0], rolled]
        noise = self.correlated_noise * generator.standard_normal(signals.shape)
        signals = np.where(inside, signals, gaussian_filter1d(noise, SMOOTHING, axis=1))
        signals += self.white_noise * generator.standard_normal(signals.shape)
        tilt = self.shear * (generator.random((count, 1)) - 0.5)
        signals -= tilt * np.linspace(-0.5, 0.5, width + high)
        places = np.linspace(0, width + high - 1, self.length)[None]
        return _between(signals, steps[0], places), labels


def _templates() -> np.ndarray:
    """Standardize the templates, shift them to begin at zero, and divide by six."""
    scaled = (TEMPLATES - TEMPLATES.mean(axis=1, keepdims=True)) / TEMPLATES.std(
        axis=1, keepdims=True
    )
    return (scaled - scaled[:, :1]) / 6


def _between(signals: np.ndarray, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Interpolate signals linearly at fractional places."""
    before = np.floor(places).astype(int)
    after = np.minimum(before + 1, signals.shape[1] - 1)
    share = places - before
    return (1 - share) * signals[rows, before] + share * signals[rows, after]


@lru_cache(maxsize=2)
def _data(task: MNIST1D) -> Data:
    parts = draw_examples(task.draw, task.data_seed, task.num_train, task.num_test)
    train_inputs, train_targets, test_inputs, test_targets = parts
    mean, deviation = train_inputs.double().mean(), train_inputs.double().std(correction=0)
    return Data(
        train_inputs=((train_inputs - mean) / deviation).float(),
        train_targets=train_targets,
        test_inputs=((test_inputs - mean) / deviation).float(),
        test_targets=test_targets,
        input_shape=(task.length,),
        num_outputs=NUM_CLASSES,
    )
