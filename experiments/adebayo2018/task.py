"""Saliency maps of a classifier, compared after its layers are randomized one by one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from gradsurg.plugins.fields import FieldError, validated
from gradsurg.tasks.base import Classification, Data, Examination, Examined, Task
from gradsurg.tasks.data.arrays import Count
from gradsurg.tasks.data.image_tasks import image_task

DIGITS = 4  # of the numbers in the saved pictures
WINDOW = 7
K1, K2 = 0.01, 0.03


@validated
class Saliency(Classification, Examined):
    """Classify images, then examine saliency maps (Adebayo et al. 2018, arXiv 1810.03292).

    A map is the gradient, with respect to the image, of the score of the class that the trained
    model predicts. The layers are randomized one by one from the top (the last registered layer),
    each by its `reset_parameters`, and each time the maps of the first `num_maps` test images are
    compared with the original maps. Three measures, 1 for equal maps, are means over images with
    all layers from the top down to <layer> randomized. `rank/<layer>` is Spearman's correlation,
    `abs_rank/<layer>` Spearman's correlation of the magnitudes, and `ssim/<layer>` the structural
    similarity of the magnitudes. The maps of the first `num_kept` images are saved as pictures.
    `data` is digits, or mnist or fashion_mnist with the task's `root`, `num_train` and `num_test`.
    """

    data: Literal["digits", "mnist", "fashion_mnist"] = "digits"
    root: str | None = None
    num_train: Count | None = None
    num_test: Count | None = None
    num_maps: Count = 64
    num_kept: Annotated[int, Field(ge=0)] = 4

    def __post_init__(self) -> None:
        _ = self.images  # raises for options that the task of the images does not have

    def load(self) -> Data:
        return self.images.load()

    def files(self) -> Sequence[Path]:
        return self.images.files()

    @property
    def images(self) -> Task:
        """The task whose images are used."""
        return image_task(self.data, self.root, self.num_train, self.num_test)

    def examine(self, model: nn.Module, data: Data) -> Examination:
        images = data.test_inputs[: self.num_maps].to(next(model.parameters()).device)
        with torch.no_grad():
            classes = model(images).argmax(dim=1)
        trained = maps(model, images, classes)
        saved, numbers = {"trained": trained}, {}
        for name in drawn_anew(model):
            found = saved[name] = maps(model, images, classes)
            for measure, values in _compared(trained, found).items():
                numbers[f"{measure}/{name}"] = values.mean().item()
        pictures = [_picture(image) for image in images[: self.num_kept]]
        return Examination(
            numbers,
            {
                "classes": classes[: self.num_kept].tolist(),
                "images": pictures,
                "maps": {
                    name: [_picture(one) for one in found[: self.num_kept]]
                    for name, found in saved.items()
                },
            },
        )


def maps(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Return the gradient of the score of each image's class with respect to the image."""
    images = images.clone().requires_grad_()
    scores = model(images).gather(1, classes[:, None])
    return torch.autograd.grad(scores.sum(), images)[0]


def drawn_anew(model: nn.Module) -> Iterator[str]:
    """Randomize one layer after another from the top, yielding its name; restore all at the end."""
    layers = []
    for name, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        draw = getattr(module, "reset_parameters", None)
        if not callable(draw):
            layer = f"{name or 'the model itself'} ({type(module).__name__})"
            rule = "every layer must have reset_parameters to be drawn anew"
            raise FieldError("the model", [("", f"{rule}, found {layer}")])
        layers.append((name, draw))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        for name, draw in reversed(layers):
            draw()
            yield name
    finally:
        model.load_state_dict(before)


def _compared(before: Tensor, after: Tensor) -> dict[str, Tensor]:
    return {
        "rank": rank_correlation(before, after),
        "abs_rank": rank_correlation(before.abs(), after.abs()),
        "ssim": ssim(before.abs(), after.abs()),
    }


def _picture(values: Tensor) -> list[list[float]]:
    """Return rows of the mean over channels, divided by the largest magnitude."""
    flat = values.detach().mean(dim=0).cpu()
    flat = flat / flat.abs().max().clamp(min=torch.finfo(flat.dtype).tiny)
    return [[round(value, DIGITS) for value in row] for row in flat.tolist()]


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return Spearman's correlation of each example; equal entries share the mean of their ranks.

    0 where one of the two is constant.
    """
    pairs = zip(first.flatten(1), second.flatten(1), strict=True)
    return torch.stack([_correlation(_ranks(a), _ranks(b)) for a, b in pairs])


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the structural similarity of images (examples, channels, height, width), one by one.

    It follows Wang et al. 2004, with each image divided by its largest magnitude. It is the mean
    over all windows of 7 x 7 (smaller for a smaller image), in which all entries have one weight.
    """
    a, b = _scaled(first.double()), _scaled(second.double())
    side = min(WINDOW, *a.shape[2:])
    unbiased = side**2 / (side**2 - 1) if side > 1 else 1.0

    def mean(values: Tensor) -> Tensor:
        return functional.avg_pool2d(values, side, stride=1)

    mean_a, mean_b = mean(a), mean(b)
    var_a = unbiased * (mean(a * a) - mean_a**2)
    var_b = unbiased * (mean(b * b) - mean_b**2)
    cov = unbiased * (mean(a * b) - mean_a * mean_b)
    c1, c2 = K1**2, K2**2
    alike = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
    return (alike / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).flatten(1).mean(dim=1)


def _ranks(values: Tensor) -> Tensor:
    if not values.isfinite().all():  # which has no order
        return torch.full_like(values, torch.nan, dtype=torch.float64)
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2.0).double()[place]


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(), b - b.mean()
    norms = a.norm() * b.norm()
    return torch.where(norms > 0, (a @ b) / norms.where(norms > 0, norms + 1), norms)


def _scaled(images: Tensor) -> Tensor:
    largest = images.abs().amax(dim=(1, 2, 3), keepdim=True)
    return images / largest.where(largest > 0, largest + 1)
