"""How alike two maps are: by the ranks of their entries, and by their structure."""

import torch
from torch import Tensor
from torch.nn import functional

WINDOW = 7
K1, K2 = 0.01, 0.03


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's correlation, example by example; equal entries share the mean of their ranks.

    It is 0 where one of the two is constant and so has no order.
    """
    pairs = zip(first.flatten(1), second.flatten(1), strict=True)
    return torch.stack([_correlation(_ranks(a), _ranks(b)) for a, b in pairs])


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """The structural similarity of images (examples, channels, height, width), one by one.

    That of Wang et al. 2004, with each image in units of its largest entry: the mean over all
    windows of 7 x 7 (less where an image is smaller) that lie inside, each entry of equal weight.
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
