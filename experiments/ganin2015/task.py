"""Two moons in two domains, of which the second is rotated and has no labels in training."""

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, MultiTask, Outputs, by_name, floats, parts_of
from gradsurg.tasks.data.arrays import Seed, draw_examples

LABELS = ("source", "domain")
SIZES = (2, 2)
MIDDLE = (0.5, 0.25)  # between the moons
SCALE = 2.0


@validated
class TwoMoonsShift(MultiTask):
    """Classify two moons in a domain without labels (Ajakan et al. 2014, arXiv 1412.4446).

    The source domain is two moons with Gaussian noise of deviation `noise`; the target domain is
    another draw, rotated by `angle` degrees around the middle; both have `num_train` points. The
    losses are cross-entropies. `source` has the labels of the source domain, and is 0 in a batch
    without it; `domain` has the domain of every point. The labels of the target domain are in no
    loss. `accuracy` is the accuracy of the labels in the target domain, `accuracy_source` in the
    source domain, and `accuracy_domain` the accuracy of the domains. With `shuffled_domains` the
    domains in the targets are random. Targets are the label, the domain to predict, and the true
    domain (0: source). All depends on `data_seed` alone.
    """

    angle: Annotated[float, Field(ge=-180, le=180)] = 35.0
    noise: Annotated[float, Field(ge=0)] = 0.05
    num_train: Annotated[int, Field(ge=2)] = 150
    num_test: Annotated[int, Field(ge=2)] = 1000
    shuffled_domains: bool = False
    data_seed: Seed = 0

    @property
    def names(self) -> tuple[str, ...]:
        return LABELS

    def load(self) -> Data:
        return _data(self).copy()

    def losses(self, outputs: Outputs, targets: Tensor) -> dict[str, Tensor]:
        labels, domains = parts_of(outputs, SIZES, len(targets))
        source = targets[:, 2] == 0
        # A selection of rows would wait for the device.
        known = source * functional.cross_entropy(labels, targets[:, 0], reduction="none")
        return {
            "source": known.sum() / source.sum().clamp(min=1),
            "domain": functional.cross_entropy(domains, targets[:, 1]),
        }

    def metrics(self, outputs: Outputs, targets: Tensor) -> dict[str, float]:
        losses = floats(self.losses(outputs, targets).values())
        labels, domains = parts_of(outputs, SIZES, len(targets))
        source = targets[:, 2] == 0
        right = labels.argmax(dim=1) == targets[:, 0]
        of_domain = domains.argmax(dim=1) == targets[:, 1]
        asked, *shares = floats(map(_share, (right[~source], right[source], of_domain)))
        return {
            "loss": sum(losses),
            "accuracy": asked,
            **by_name("loss", LABELS, losses),
            **by_name("accuracy", LABELS, shares),
        }

    def draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return points (2 count, 2), the source first, and targets (2 count, 3)."""
        (source, labels), (target, others) = (self._moons(generator, count) for _ in range(2))
        turn = np.deg2rad(self.angle)
        target = target @ np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
        domain = np.repeat([0, 1], count)
        said = generator.permutation(domain) if self.shuffled_domains else domain
        asked = np.stack([np.concatenate([labels, others]), said, domain], axis=1)
        return np.concatenate([source, target]), asked

    def _moons(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw two interleaved half circles."""
        upper, lower = (np.linspace(0, np.pi, part) for part in (count // 2, count - count // 2))
        points = np.concatenate(
            [
                np.stack([np.cos(upper), np.sin(upper)], axis=1),
                np.stack([1 - np.cos(lower), 0.5 - np.sin(lower)], axis=1),
            ]
        )
        points = points + self.noise * generator.standard_normal(points.shape)
        return SCALE * (points - MIDDLE), np.repeat([0, 1], [len(upper), len(lower)])


def _share(right: Tensor) -> Tensor:
    """Return the share of True; 0 for an empty tensor."""
    return right.double().sum() / max(len(right), 1)


@lru_cache(maxsize=8)
def _data(task: TwoMoonsShift) -> Data:
    parts = draw_examples(task.draw, task.data_seed, task.num_train, task.num_test)
    return Data(*parts, input_shape=(2,), num_outputs=sum(SIZES), heads=SIZES)
