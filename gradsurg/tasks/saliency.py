"""Saliency: do maps of what a score depends on change when the layers are drawn anew?"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from gradsurg.plugins.fields import validated
from gradsurg.tasks._generated import Count
from gradsurg.tasks._pictures import pictures
from gradsurg.tasks._similarity import rank_correlation, ssim
from gradsurg.tasks.base import Classification, Data, Examination, Examined, Task

DIGITS = 4  # of the numbers in the pictures that are kept


@validated
class Saliency(Classification, Examined):
    """Classify images, then examine the maps (Adebayo et al. 2018, arXiv 1810.03292).

    A map is the gradient, with respect to the image, of the score of the class that the trained
    model predicts. Those of the first `num_maps` test images are compared with themselves after
    the layers have been drawn anew, one after the other from the top (the last that the model has
    registered), each as it draws itself (`reset_parameters`). `rank/<layer>` is Spearman's
    correlation with all from the top down to that layer drawn anew, `abs_rank/<layer>` that of the
    magnitudes, `ssim/<layer>` the structural similarity of the magnitudes; each is a mean over
    images, and 1 if nothing has changed. Of the first `num_kept` images the maps are kept, as
    pictures. `data` is digits, or mnist or fashion_mnist with the `root`, `num_train` and
    `num_test` of that task.
    """

    data: Literal["digits", "mnist", "fashion_mnist"] = "digits"
    root: str | None = None
    num_train: Count | None = None
    num_test: Count | None = None
    num_maps: Count = 64
    num_kept: Annotated[int, Field(ge=0)] = 4

    def __post_init__(self) -> None:
        _ = self.images

    def load(self) -> Data:
        return self.images.load()

    def files(self) -> Sequence[Path]:
        return self.images.files()

    @property
    def images(self) -> Task:
        """What has them."""
        return pictures(self.data, self.root, self.num_train, self.num_test)

    def examine(self, model: nn.Module, data: Data) -> Examination:
        images = data.test_inputs[: self.num_maps].to(next(model.parameters()).device)
        with torch.no_grad():
            classes = model(images).argmax(dim=1)
        trained = maps(model, images, classes)
        kept, numbers = {"trained": trained}, {}
        for name in drawn_anew(model):
            found = kept[name] = maps(model, images, classes)
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
                    for name, found in kept.items()
                },
            },
        )


def maps(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """The gradient of the score of its class with respect to each image."""
    images = images.clone().requires_grad_()
    scores = model(images).gather(1, classes[:, None])
    return torch.autograd.grad(scores.sum(), images)[0]


def drawn_anew(model: nn.Module) -> Iterator[str]:
    """Draw one layer more anew, from the top, and name it; in the end all are as they were."""
    layers = []
    for name, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        draw = getattr(module, "reset_parameters", None)
        if not callable(draw):
            found = f"{name or 'the model itself'} ({type(module).__name__})"
            raise ValueError(
                f"every layer must have reset_parameters to be drawn anew, found {found}"
            )
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
    """Rows of the mean over channels, in units of the largest magnitude."""
    flat = values.detach().mean(dim=0).cpu()
    flat = flat / flat.abs().max().clamp(min=torch.finfo(flat.dtype).tiny)
    return [[round(value, DIGITS) for value in row] for row in flat.tolist()]
