"""GHM: weight the examples of a batch by how rare the norms of their gradients are."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import (
    ExampleWeighting,
    GroupTransform,
    TransformContext,
    TransformState,
)


@validated
class GHM(GroupTransform, ExampleWeighting):
    """Weight the gradient g_i of each of n examples by n / (B R_i), inversely to its density.

    [0, 1] is divided into `bins` intervals of equal length. R_i is the number of examples in the
    interval of u_i = |g_i| / max_k |g_k|, in joint 2-norms over the parameters of the site. B is
    the number of intervals that have examples, so that the weights have the mean 1. Examples of
    backward passes of unequal size are counted by their weights in the loss (see `PerSample`).

    This is the gradient harmonizing mechanism (GHM-C) of Li, Liu, Wang, AAAI 2019 (arXiv
    1811.05181), section 3.3, without the moving average, like the authors' code with momentum 0.
    There the u_i are |p - p*| of a binary cross-entropy, which are in [0, 1] by themselves.

    At parameters, by itself or as `PerSample(GHM())`. Any shapes; zero gradients share the first
    interval. If a norm is not finite all examples share an interval, so that each has the weight 1,
    and NaN and infinities stay. Empty tensors stay empty. Without a batch, for example outside a
    surgery, the gradient belongs to one example, whose weight is 1.
    """

    bins: Annotated[int, Field(ge=1)] = 10

    tags = frozenset({"deterministic"})

    needed = frozenset({"examples"})

    @torch.no_grad()
    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        examples = contexts[0].examples
        if examples is None:
            return list(grads), state
        results = examples.weighted(self.example_weights(examples.norms, contexts[0]))
        return [result.to(grad.dtype) for result, grad in zip(results, grads, strict=True)], state

    def example_weights(self, norms: Callable[[], Tensor], context: TransformContext) -> Tensor:
        sizes = norms()
        shares = (sizes / sizes.max()).nan_to_num(nan=0.0)
        places = (shares * self.bins).long().clamp(max=self.bins - 1)
        is_in = places[:, None] == torch.arange(self.bins, device=sizes.device)
        counts, examples = is_in.sum(0), context.examples
        if examples is not None and examples.shares is not None:
            counts = (is_in * examples.shares[:, None]).sum(0)
            counts = counts / counts.sum() * len(sizes)
        return len(sizes) / ((counts > 0).sum() * counts[places]).to(sizes.dtype)
