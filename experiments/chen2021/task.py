"""Two views of an image: predict the embedding of one from the other, without negatives."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Task
from gradsurg.tasks.data.arrays import Count, Seed
from gradsurg.tasks.data.image_tasks import image_task

PARTS = 4  # of the outputs: the prediction from each view, and the target of each
CHUNK = 4096  # images whose views are made at once
NEAREST = 10  # neighbours that vote
MOST_NEIGHBOURS = 2000  # examples among which neighbours are searched


@validated
class TwoViews(Task):
    """Predict the embedding of one view of an image from the other (SimSiam, arXiv 2011.10566).

    The outputs are four parts of `size`: the predictions p1 and p2 and the targets z1 and z2 of the
    views; the loss is the mean of -cos(p1, z2) and -cos(p2, z1). `spread` is the deviation over the
    examples of z1, normalized to length one, times sqrt(size): 1 for uniform directions, 0 after a
    collapse. `knn_accuracy` is the accuracy of the majority label of the 10 nearest z1 among the
    first 2,000 examples; labels are in no loss. A view is a crop of the image, each side at least
    `min_side` of the image's, scaled to full size, mirrored or not, with Gaussian noise of
    deviation `noise`. Each image has one pair of views, which follows from `data_seed`. `data` is
    digits, or fashion_mnist with the task's `root`, `num_train` and `num_test`.
    """

    data: Literal["digits", "fashion_mnist"] = "digits"
    size: Count = 64
    min_side: Annotated[float, Field(gt=0, le=1)] = 0.6
    noise: Annotated[float, Field(ge=0)] = 0.2
    root: str | None = None
    num_train: Count | None = None
    num_test: Count | None = None
    data_seed: Seed = 0

    def __post_init__(self) -> None:
        _ = self.images  # raises for options that the task of the images does not have

    def load(self) -> Data:
        return _data(self, self.content).copy()

    def files(self) -> Sequence[Path]:
        return self.images.files()

    @property
    def images(self) -> Task:
        """The task whose images are used."""
        return image_task(self.data, self.root, self.num_train, self.num_test)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != (len(targets), PARTS * self.size):
            rule = f"must have the shape {[len(targets), PARTS * self.size]}"
            raise ValueError(f"outputs {rule}, found {list(outputs.shape)}")
        p1, p2, z1, z2 = outputs.chunk(PARTS, dim=1)
        agreed = functional.cosine_similarity(p1, z2) + functional.cosine_similarity(p2, z1)
        return -agreed.mean() / 2

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        embeddings = functional.normalize(outputs.chunk(PARTS, dim=1)[2], dim=1)
        return {
            "loss": self.loss(outputs, targets).item(),
            "spread": (embeddings.std(dim=0, correction=0).mean() * self.size**0.5).item(),
            "knn_accuracy": _knn(embeddings[:MOST_NEIGHBOURS], targets[:MOST_NEIGHBOURS]),
        }

    def views(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a pair of views of each image (examples, channels, height, width)."""
        parts = images.split(CHUNK)
        pairs = [[self._view(part, generator) for _ in range(2)] for part in parts]
        return torch.cat([torch.stack(pair, dim=1) for pair in pairs])

    def _view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        def uniform(*shape: int) -> Tensor:
            return torch.rand(len(images), *shape, generator=generator)

        sides = self.min_side + (1 - self.min_side) * uniform(2)
        middles = (1 - sides) * (2 * uniform(2) - 1)
        mirrored = torch.where(uniform() < 0.5, -1.0, 1.0)
        where = torch.zeros(len(images), 2, 3)
        where[:, 0, 0], where[:, 1, 1] = sides[:, 0] * mirrored, sides[:, 1]
        where[:, :, 2] = middles
        grid = functional.affine_grid(where, list(images.shape), align_corners=False)
        seen = functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
        return seen + self.noise * torch.randn(images.shape, generator=generator)


def _knn(embeddings: Tensor, labels: Tensor) -> float:
    """Return the accuracy of a vote of the nearest others; 0 if there are none."""
    count = min(NEAREST, len(embeddings) - 1)
    if not count:
        return 0.0
    similarity = (embeddings @ embeddings.T).fill_diagonal_(-torch.inf)
    votes = functional.one_hot(labels[similarity.topk(count).indices]).sum(dim=1)
    return (votes.argmax(dim=1) == labels).double().mean().item()


@lru_cache(maxsize=1)
def _data(task: TwoViews, content: str) -> Data:
    data = task.images.load()
    shape = data.input_shape if len(data.input_shape) == 3 else (1, *data.input_shape)
    inputs = []
    for part, images in enumerate((data.train_inputs, data.test_inputs)):
        generator = torch.Generator().manual_seed(2 * task.data_seed + part)
        inputs.append(task.views(images.view(-1, *shape), generator))
    return Data(
        train_inputs=inputs[0],
        train_targets=data.train_targets,
        test_inputs=inputs[1],
        test_targets=data.test_targets,
        input_shape=(2, *shape),
        num_outputs=PARTS * task.size,
    )
