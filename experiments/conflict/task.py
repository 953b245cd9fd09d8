"""Tasks of several losses that conflict by as much as a field says."""

from dataclasses import replace
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from gradsurg.experiments.chaudhry2019.task import LABEL, TASK, PermutedMNIST
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, MultiTask, Outputs, by_name, floats, parts_of
from gradsurg.tasks.data.arrays import Count, Seed, draw_examples
from gradsurg.tasks.digits import Digits
from gradsurg.tasks.mnist_overlay import MNISTOverlay

Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=1)]
NEXT = 1  # a contradicting label is that of the next digit
RIDGE = 1e-2
NUM_INPUTS = 10  # of Friedman's functions


@validated
class SplitOverlay(MNISTOverlay):
    """`MNISTOverlay` with other pairs of digits for each `split_seed`."""

    split_seed: Seed = 0

    def load_with_validation(self, share: float) -> Data:
        pairs = {"root": self.root, "num_train": self.num_train, "num_test": self.num_test}
        own = MNISTOverlay(**pairs, shift=self.shift, data_seed=self.split_seed, verify=self.verify)
        return own.load_with_validation(share)


class LossesAlone(MultiTask):
    """Base class: the metrics are the losses."""

    def metrics(self, outputs: Outputs, targets: Tensor) -> dict[str, float]:
        losses = floats(self.losses(outputs, targets).values())
        return {"loss": sum(losses), **by_name("loss", self.names, losses)}


@validated
class ContradictingLabels(LossesAlone):
    """Two labels for the same ten outputs: digits, of which a share `rho` has a second label.

    Both losses are cross-entropies. The label of the second loss is that of the first, but for a
    random share `rho` of the examples, training and test, where it is the next digit. An input does
    not tell whether it is one of them.
    """

    rho: Share = 0.5
    split_seed: Seed = 0

    @property
    def names(self) -> tuple[str, ...]:
        return ("true", "other")

    def load(self) -> Data:
        data = Digits(split_seed=self.split_seed).load()
        generator = np.random.default_rng(self.split_seed)
        train, test = (self._doubled(x, generator) for x in (data.train_targets, data.test_targets))
        return replace(data, train_targets=train, test_targets=test)

    def _doubled(self, labels: Tensor, generator: np.random.Generator) -> Tensor:
        moved = torch.from_numpy(generator.random(len(labels)) < self.rho)
        return torch.stack([labels, (labels + NEXT * moved) % 10], dim=1)

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        columns = zip(self.names, targets.unbind(dim=1), strict=True)
        return {name: functional.cross_entropy(outputs, column) for name, column in columns}


@validated
class FriedmanMulti(LossesAlone):
    """Friedman's first function of three choices of five among ten inputs, of different scales.

    y = 10 sin(pi a b) + 20 (c - 1/2)^2 + 10 d + 5 e + noise (Friedman 1991, The Annals of
    Statistics 19), standardized, by squared error. The losses are multiplied by 1, the root of
    `ratio`, and `ratio`; the metrics are without these factors.
    """

    ratio: Ratio = 10.0
    noise: Annotated[float, Field(ge=0)] = 1.0
    num_train: Count = 1000
    num_test: Count = 1000
    split_seed: Seed = 0

    @property
    def names(self) -> tuple[str, ...]:
        return ("first", "second", "third")

    @property
    def factors(self) -> tuple[float, ...]:
        """The factor of each loss."""
        return (1.0, self.ratio**0.5, self.ratio)

    def load(self) -> Data:
        parts = draw_examples(self._draw, self.split_seed, self.num_train, self.num_test)
        train, train_targets, test, test_targets = parts
        return Data(
            train_inputs=train,
            train_targets=train_targets,
            test_inputs=test,
            test_targets=test_targets,
            input_shape=(NUM_INPUTS,),
            num_outputs=len(self.names),
            heads=(1,) * len(self.names),
        )

    def _draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = generator.random((count, NUM_INPUTS))
        noise = self.noise * generator.standard_normal((count, len(self.names)))
        chosen = ((0, 1, 2, 3, 4), (4, 5, 6, 7, 8), (2, 8, 0, 9, 3))
        values = [_friedman(*inputs[:, columns].T) for columns in chosen]
        return 2 * inputs - 1, (np.stack(values, axis=1) + noise - 14.4) / 4.9

    def losses(self, outputs: Outputs, targets: Tensor) -> dict[str, Tensor]:
        alone = self._alone(outputs, targets)
        return {
            name: factor * alone[name] for name, factor in zip(alone, self.factors, strict=True)
        }

    def metrics(self, outputs: Outputs, targets: Tensor) -> dict[str, float]:
        return super(FriedmanMulti, replace(self, ratio=1.0)).metrics(outputs, targets)

    def _alone(self, outputs: Outputs, targets: Tensor) -> dict[str, Tensor]:
        parts = parts_of(outputs, (1,) * len(self.names), len(targets))
        columns = zip(self.names, parts, targets.split(1, dim=1), strict=True)
        return {name: functional.mse_loss(part, column) for name, part, column in columns}


def _friedman(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, e: np.ndarray):
    return 10 * np.sin(np.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e


@validated
class NoisyQuadratics(LossesAlone):
    """Two quadratics of one point in the plane, of noisy examples of their centres.

    loss_i is the mean over examples of |A_i (x - c)|^2 / 2, c from a normal distribution around
    (-1, 0) or (1, 0), with A_1 = diag(1, `ratio`) and A_2 = diag(`ratio`, 1). The point is the
    output of a linear model without inputs. Its front is known: x with weights w of the simplex
    is (sum w_i A_i^2)^-1 sum w_i A_i^2 c_i.
    """

    ratio: Ratio = 3.0
    noise: Annotated[float, Field(ge=0)] = 1.0
    num_train: Count = 1000
    num_test: Count = 1000
    split_seed: Seed = 0

    @property
    def names(self) -> tuple[str, ...]:
        return ("left", "right")

    @cached_property
    def squares(self) -> Tensor:
        """The diagonal of A_i^2 of each loss."""
        return torch.tensor([[1.0, self.ratio**2], [self.ratio**2, 1.0]])

    def load(self) -> Data:
        parts = draw_examples(self._draw, self.split_seed, self.num_train, self.num_test)
        train, train_targets, test, test_targets = parts
        return Data(
            train_inputs=train,
            train_targets=train_targets,
            test_inputs=test,
            test_targets=test_targets,
            input_shape=(1,),
            num_outputs=2,
        )

    def _draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        centres = self.noise * generator.standard_normal((count, 2, 2))
        centres[:, :, 0] += (-1, 1)
        return np.ones((count, 1)), centres.reshape(count, 4)

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        away = outputs[:, None] - targets.unflatten(1, (2, 2))
        values = (self.squares.to(away) * away.square()).sum(dim=2).mean(dim=0) / 2
        return dict(zip(self.names, values.unbind(), strict=True))

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """The losses without noise, as shares of what the other's best point costs."""
        centres = torch.tensor([-1.0, 0.0, 1.0, 0.0]).expand(1, -1)
        values = self.losses(outputs.mean(dim=0, keepdim=True).cpu(), centres)
        losses = floats(value / (2 * self.squares[i, 0]) for i, value in enumerate(values.values()))
        return {"loss": sum(losses), **by_name("loss", self.names, losses)}


@validated
class LabelAgainstDomain(LossesAlone):
    """Tell digits below 5 from others by features from which the domain cannot be told.

    In the second domain images are mirrored. An image's domain is its label with probability `rho`,
    else chance, so that features without the domain lose the label where `rho` is large. The
    adversary of Ganin and Lempitsky (2015) is replaced by the best linear one of each batch, in
    closed form: `domain` is the share of the domain's variance that a ridge regression on the
    features explains.
    """

    rho: Share = 0.7
    split_seed: Seed = 0

    @property
    def names(self) -> tuple[str, ...]:
        return ("label", "domain")

    def load(self) -> Data:
        data = Digits(split_seed=self.split_seed).load()
        generator = np.random.default_rng(self.split_seed)
        train = self._in_domains(data.train_inputs, data.train_targets, generator)
        test = self._in_domains(data.test_inputs, data.test_targets, generator)
        parts = {"train_inputs": train[0], "train_targets": train[1]}
        return replace(data, **parts, test_inputs=test[0], test_targets=test[1], num_outputs=2)

    def _in_domains(
        self, images: Tensor, digits: Tensor, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        labels = (digits < 5).long()
        follows = torch.from_numpy(generator.random(len(labels)) < self.rho)
        chance = torch.from_numpy(generator.integers(0, 2, len(labels)))
        domains = torch.where(follows, labels, chance)
        mirrored = torch.where(domains[:, None, None, None] > 0, images.flip(3), images)
        return mirrored, torch.stack([labels, domains], dim=1)

    def losses(self, outputs: Outputs, targets: Tensor) -> dict[str, Tensor]:
        logits, features = outputs[:, :2], outputs[:, 2:]
        label, domain = targets.unbind(dim=1)
        return {
            "label": functional.cross_entropy(logits, label),
            "domain": explained(features, domain.to(features)),
        }


@validated
class PermutedStream(PermutedMNIST):
    """`PermutedMNIST` with other permutations and images for each `split_seed`.

    It is trained on the losses `now` and `memory`, and measured by the loss on the last task,
    `new`, and the mean loss on the tasks before, `old`. Validation images are others of the test
    files.
    """

    num_test: Count = 1000
    split_seed: Seed = 0

    def load(self) -> Data:
        return self.load_with_validation(0)

    def load_with_validation(self, share: float) -> Data:
        own = {name: getattr(self, name) for name in ("root", "num_tasks", "num_train", "verify")}
        own |= {"per_class": self.per_class, "memory_batch": self.memory_batch}
        twin = PermutedMNIST(**own, data_seed=self.split_seed, num_test=2 * self.num_test).load()
        blocks = twin.test_inputs.unflatten(0, (self.num_tasks, 2, self.num_test)).unbind(dim=1)
        targets = twin.test_targets.unflatten(0, (self.num_tasks, 2, self.num_test)).unbind(dim=1)
        (test, other), (test_targets, other_targets) = (
            # by turns of the tasks, so that a few examples have both losses
            [part.transpose(0, 1).flatten(0, 1) for part in parts]
            for parts in (blocks, targets)
        )
        return replace(
            twin,
            test_inputs=test,
            test_targets=test_targets,
            validation_inputs=other if share else None,
            validation_targets=other_targets if share else None,
        )

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        each = functional.cross_entropy(outputs, targets[:, LABEL], reduction="none")
        old = targets[:, TASK] < self.num_tasks - 1
        parts = {"new": each[~old], "old": each[old]}
        there = {name: part.mean().item() for name, part in parts.items() if len(part)}
        return {"loss": sum(there.values()), **{f"loss_{name}": x for name, x in there.items()}}

    @property
    def trajectory_metric_names(self) -> tuple[str, ...]:
        return ()


def explained(features: Tensor, values: Tensor) -> Tensor:
    """Return the share of the variance of values (n,) that features (n, p) explain, by ridge.

    The penalty is relative to the features' mean square, so that their scale does not matter.
    """
    features, values = features - features.mean(dim=0), values - values.mean()
    size = features.square().sum() / features.shape[1]
    ridge = (RIDGE * size).clamp(min=1e-12) * torch.eye(features.shape[1]).to(features)
    moment = features.T @ values
    fitted = moment @ torch.linalg.solve(features.T @ features + ridge, moment)
    return fitted / values.square().sum().clamp(min=1e-6)
