"""PerSample: act on the gradient of each example of the batch, then combine them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.transforms.base import (
    Examples,
    ExampleWeighting,
    GroupTransform,
    Need,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
    as_transform,
    init_all,
    update_all,
)
from gradsurg.transforms.chain import Chain, links_of
from gradsurg.transforms.identity import Identity


def _checked(of: Any) -> Any:  # Any: a transform, a function, or an aggregator of several rows
    of = as_transform(of)
    if isinstance(of, Transform) or (hasattr(of, "merge") and not isinstance(of, type)):
        return of
    hint = f": did you mean {of.__name__}()?" if isinstance(of, type) else ""
    raise ValueError(f"must be a transform or an aggregator{hint}")


@validated
class PerSample(GroupTransform):
    """Apply a transform T to the gradient g_i of each of n examples, or aggregate them by A.

    Args:

    - `of`: T or A, which acts on all parameters of the site together. T must have no state, and A
      must not be an aggregator that weights losses, such as `Mean` or `Sum`.
    - `noise`: add N(0, (noise C)²) to the sum of the T(g_i), for a T that bounds each norm by C,
      such as `ClipGlobalNorm`.
    - `reduction`: whether the loss is the `mean` or the `sum` over the batch.

    The result is Σ T(g_i) / n or A(g_1, ..., g_n) for a loss that is a mean, and n times that for a
    sum. The batch of a step consists of the examples of all its backward passes. For a mean over K
    passes, make the loss of each the mean over its own n_k examples, divided by K. Then T(g_i) has
    the weight 1 / (K n_k) in place of 1 / n, and A has the g_i as they are.

    With `noise` this is the update of DP-SGD (Abadi et al., CCS 2016, arXiv 1607.00133, algorithm
    1), with C multiplied by the largest of the n / (K n_k). No privacy follows without Poisson
    sampling and an accountant, which gradsurg does not have.

    Any shapes; zeros, NaN, infinities and empty tensors become what T or A makes of them, so that
    one NaN of one example reaches the result. Without a batch, for example outside a surgery, the
    gradient belongs to one example.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> with gs.Surgery(gs.Intervention(gs.PerSample(gs.ClipNorm(1.0)))).attach(layer, optimizer):
    ...     layer(torch.tensor([[3.0, -4.0], [0.2, 0.4]])).mean().backward()
    ...     optimizer.step()  # the surgery acts before the step
    >>> layer.weight.grad  # the mean of 0.6, -0.8 and 0.2, 0.4
    tensor([[ 0.4000, -0.2000]])
    """

    of: Annotated[Any, BeforeValidator(_checked)] = Identity()
    _: KW_ONLY
    noise: Annotated[float, Field(ge=0)] = 0.0
    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        nested = isinstance(self.of, Transform) and "examples" in self.of.needs
        if nested and not isinstance(self.of, ExampleWeighting):
            rule = (
                "must act on the gradient of one example; PerSample and GHM act on all of a batch"
            )
            raise Contradiction("of", f"{rule}, found {self.of!r}")
        if isinstance(self.of, Transform):
            has_state = bool(init_all(self.of, [torch.zeros(1)]))
        elif hasattr(self.of, "weigh"):
            rule = "must read the gradients, and this aggregator weights losses"
            raise Contradiction("of", f"{rule}, found {self.of!r}")
        else:
            aggregator: Any = self.of  # of a floor that may not be imported here
            has_state = bool(aggregator.init(8))
        if has_state:
            rule = "must have no state, as no two steps have the same examples"
            raise Contradiction("of", f"{rule}, found {self.of!r}")
        if self.noise and self._bound is None:
            rule = "needs a transform that bounds the norm of each gradient, such as ClipGlobalNorm"
            raise Contradiction("noise", f"{rule}, found of={self.of!r}")

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"deterministic": not self.noise and "deterministic" in self.of.properties}

    @property
    def needs(self) -> frozenset[Need]:
        of = self.of.needs if isinstance(self.of, Transform) else frozenset[Need]()
        own: frozenset[Need] = frozenset({"value", "examples"})
        return of | own

    @property
    def _bound(self) -> float | None:
        return self.of.example_bound if isinstance(self.of, ExampleWeighting) else None

    @torch.no_grad()
    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        examples = contexts[0].examples or _OneExample(grads)
        count = examples.count
        scale = count if self.reduction == "mean" else 1  # from the rows to the g_i
        weights = None
        if isinstance(self.of, ExampleWeighting):
            weights = self.of.example_weights(lambda: examples.norms() * scale, contexts[0])
        if weights is not None:
            results = examples.weighted(weights)
        elif not isinstance(self.of, Transform):
            results = [result * count for result in examples.merged(self.of, contexts[0])]
        else:
            results = [total / scale for total in self._transformed(examples, scale, contexts)]
        if self.noise:
            deviation = self.noise * (self._bound or 0.0) / scale
            if examples.shares is not None:
                deviation = deviation * examples.shares.max()
            results = [
                result + deviation * _normal(result, context)
                for result, context in zip(results, contexts, strict=True)
            ]
        return [result.to(grad.dtype) for result, grad in zip(results, grads, strict=True)], state

    def _transformed(
        self, examples: Examples, scale: int, contexts: Sequence[TransformContext]
    ) -> list[Tensor]:
        """Return the sum over the examples of the transformed gradients, times their shares."""
        totals: list[Tensor] | None = None
        deterministic, done = "deterministic" in self.of.properties, 0
        shares = examples.shares
        calls = [context.call for context in contexts]
        for rows in examples.rows(scale):
            share = None if shares is None else shares[done]
            if deterministic:
                totals = _added(totals, self._sums(rows, contexts), share)
                done += len(rows[0])
                continue
            for example in zip(*rows, strict=True):
                for context, call in zip(contexts, calls, strict=True):
                    context.call = call * examples.count + done  # other draws for each example
                results = update_all(self.of, example, {}, contexts)[0]
                totals, done = _added(totals, list(results), share), done + 1
        for context, call in zip(contexts, calls, strict=True):
            context.call = call
        assert totals is not None
        return totals

    def _sums(self, rows: Sequence[Tensor], contexts: Sequence[TransformContext]) -> list[Tensor]:
        """Return the sums of the transformed gradients of some examples.

        If the last link of a chain multiplies each gradient by a number, the products are not
        stored: they take as long as all else.
        """
        *links, last = links_of(self.of)
        if not isinstance(last, ExampleWeighting):
            return [part.sum(0) for part in _each(self.of, rows, contexts)]
        rows = _each(Chain(*links), rows, contexts) if links else rows
        inner = [context.inside(str(len(links))) for context in contexts]
        weights = last.example_weights(lambda: _norms(rows), inner[0])
        if weights is None:
            return [part.sum(0) for part in _each(last, rows, inner)]
        sums = [weights @ part[:, None].flatten(1).to(weights.dtype) for part in rows]
        return [total.view(part.shape[1:]) for total, part in zip(sums, rows, strict=True)]


def _each(
    transform: Transform, rows: Sequence[Tensor], contexts: Sequence[TransformContext]
) -> Sequence[Tensor]:
    """Return the transformed gradients of some examples."""

    def single(*grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(update_all(transform, grads, {}, contexts)[0])

    return torch.vmap(single)(*rows)


def _norms(rows: Sequence[Tensor]) -> Tensor:
    """Return the joint norm of the gradients of each example, in float32 or wider."""
    dtype = torch.promote_types(rows[0].dtype, torch.float32)
    flat = [part[:, None].flatten(1) for part in rows]
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in flat]
    return torch.stack(norms).norm(dim=0)


def _added(
    totals: list[Tensor] | None, results: Sequence[Tensor], share: Tensor | None
) -> list[Tensor]:
    if share is not None:
        results = [result * share for result in results]
    if totals is None:
        return list(results)
    return [total + result for total, result in zip(totals, results, strict=True)]


class _OneExample:
    """The gradients of a batch of one example."""

    count = 1
    shares = None

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self.grads = grads

    def norms(self) -> Tensor:
        norms = [grad.float().norm() for grad in self.grads]
        return torch.stack(norms).norm()[None]

    def weighted(self, weights: Tensor) -> list[Tensor]:
        return [grad * weights[0] for grad in self.grads]

    def rows(self, scale: float) -> Iterator[list[Tensor]]:
        yield [grad[None] * scale for grad in self.grads]

    def merged(self, aggregator: Any, context: TransformContext) -> list[Tensor]:
        rows = torch.cat([grad.reshape(1, -1) for grad in self.grads], dim=1)
        parts = aggregator(rows).split([grad.numel() for grad in self.grads])
        return [part.view(grad.shape) for part, grad in zip(parts, self.grads, strict=True)]


def _normal(like: Tensor, context: TransformContext) -> Tensor:
    generator = context.generator(like.device)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
