"""Gradients of single examples for a group of parameters: rows, norms and weighted sums."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from math import nan
from operator import add
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from gradsurg.aggregators.base import (
    Aggregator,
    AggregatorContext,
    GramianAggregator,
    checked_update,
    needs_rows,
)
from gradsurg.aggregators.rows import cancels, gramian_of
from gradsurg.effects.tables import aligned
from gradsurg.multitask.aggregation import aggregate
from gradsurg.per_example.layers import (
    ConvolutionRule,
    EmbeddingRule,
    LayerCall,
    LinearRule,
    Rule,
    flat,
    rule_of,
)
from gradsurg.per_example.recorder import BackwardRecord, Recorder, UnitCall, tensors_in
from gradsurg.plugins.messages import shortened
from gradsurg.sites.selection import params_by_name
from gradsurg.torch_internals import autograd, random_state
from gradsurg.transforms.base import Transform, TransformContext, Wrapper
from gradsurg.transforms.per_sample import PerSample

if TYPE_CHECKING:
    from gradsurg.core.attachment import Attachment

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Largest distance of the sum of the rows from the gradient, relative to the rows' joint norm."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A parameter's use in one layer: the rule, the call and the parameter's name there."""

    rule: Rule
    call: LayerCall
    name: str


NUMBERS = ("norm_mean", "norm_median", "norm_90", "norm_max", "changed", "noise_scale")
"""Of the norms |g_i| in a step: mean, quantiles 0.5 and 0.9, largest; the share of examples whose
gradient was multiplied by a number other than 1; and the gradient noise scale. Numbers that are NaN
are left out."""


MAX_UNFETCHED = 1000
"""Measured steps whose numbers are kept until they are added up on the device."""
ENTRIES = 1 << 23
"""Entries of the rows that are in memory at a time."""
WHOLE = slice(None)


class ExampleSource:
    """The gradients of the examples of each step, and numbers about them at measured steps.

    `numbers()` has the means of `NUMBERS` over the measured steps, of the gradients g_i of the loss
    of single examples. The noise scale is tr(S) / |G|²: McCandlish et al. 2018, arXiv 1812.06162,
    appendix A.1 with batches of 1 and n. The unbiased estimates of tr(S) and |G|² are made from the
    mean of |g_i|² and the norm of the mean of g_i, each averaged over the steps. The scale is left
    out if the estimate of |G|² is not positive.
    """

    def __init__(self, recorder: Recorder, transform: Transform) -> None:
        self.recorder, self._is_checked = recorder, False
        while isinstance(transform, Wrapper):
            transform = transform.of
        self.is_mean = not isinstance(transform, PerSample) or transform.reduction == "mean"
        self._examples: ExampleGradients | None = None  # of this step, if it is measured
        self._fresh: list[Tensor] = []  # one tensor a measured step
        self._totals = torch.zeros(len(NUMBERS) + 2, dtype=torch.float64, device="cpu")

    def of_group(
        self, attachment: "Attachment", sites: Sequence[str], grads: Sequence[Tensor]
    ) -> "ExampleGradients":
        """Return the gradients of the examples for the parameters with these names.

        `grads` are the parameters' own gradients. They are compared with the sum over the examples
        at the first call, and whenever a step has several backward passes. At the first call the
        gradient of the first example is also computed without the others, and compared.
        """
        if attachment.is_scaled:
            raise ValueError(
                "PerSample: gradients of single examples are recorded times the loss scale; use a "
                "precision that needs no GradScaler, such as bfloat16"
            )
        if not self.recorder.records:
            raise RuntimeError(
                "PerSample: no backward pass of the model was recorded in this step. Call the "
                "model itself, with the batch as the first axis of its first tensor"
            )
        params = params_by_name(attachment.model)
        of_sites = {site: params[site] for site in sites}
        examples = ExampleGradients(self.recorder, of_sites, grads, self.is_mean)
        if not self._is_checked or len(self.recorder.records) > 1:
            examples.check_sum()
            if not self._is_checked:
                examples.check_first_example()
                if doubt := _reduction_doubt(examples, self.is_mean):
                    attachment.warn_once(doubt)
            self._is_checked = True
        self._examples = examples if attachment.effects.sampling else None
        return examples

    def end_step(self) -> None:
        """Measure the step, and drop its records."""
        if self._examples is not None and self._examples.count > 1:
            self._fresh.append(_measured(self._examples, self.is_mean))
            if len(self._fresh) == MAX_UNFETCHED:
                self._fresh = [torch.stack(self._fresh).sum(0)]
        self._examples = None
        self.recorder.clear()

    def fetch(self) -> dict[str, float]:
        """Return the means since the last call; empty if no step was measured."""
        if not self._fresh:
            return {}
        fresh = torch.stack(self._fresh).sum(0).double().cpu()
        self._fresh = []
        self._totals += fresh
        return _named(fresh)

    def numbers(self) -> dict[str, float]:
        """Return the means over the measured steps so far; empty if there are none."""
        self.fetch()
        return _named(self._totals) if self._totals[-1] else {}

    def table(self) -> str:
        """Return the numbers as a text table."""
        values = [f"{value:.4g}" for value in self.numbers().values()]
        return aligned([list(NUMBERS), values]) if values else "no step was measured"


def plan_of(transform: Transform, model: nn.Module, sites: Sequence[str]) -> str:
    """Return the sentence of a plan about the memory of an aggregator of the examples."""
    if not isinstance(transform, PerSample) or not isinstance(transform.of, Aggregator):
        return ""
    if not isinstance(transform.of, GramianAggregator):
        return ", stores the gradients of all examples"
    text = ", on the Gramian of the examples, without their gradients"
    factored = LinearRule | ConvolutionRule | EmbeddingRule
    layers = [path for path, layer in model.named_modules() if isinstance(rule_of(layer), factored)]
    rows = [site for site in sites if site.rpartition(".")[0] not in layers]
    return f"{text} except those of one parameter at a time of {shortened(rows)}" if rows else text


@dataclass(frozen=True, eq=False)
class ExampleGradients:
    """The gradients of the `count` examples of a step, for the parameters of a group.

    With a loss that is the mean over the batch, row i is the gradient of the loss of example i,
    divided by the number of examples. The sum of the rows, each times its share, is the gradient.
    """

    recorder: Recorder
    params: Mapping[str, nn.Parameter]
    grads: Sequence[Tensor]  # of the parameters
    is_mean: bool = True
    factors: list[Tensor] = field(default_factory=list)  # of the examples, once known

    @property
    def count(self) -> int:
        """The number of examples."""
        return sum(record.count for record in self.recorder.records)

    @cached_property
    def pass_shares(self) -> list[float]:
        """The share of each example of each backward pass."""
        counts = [record.count for record in self.recorder.records]
        if not self.is_mean or len(set(counts)) == 1:
            return [1.0] * len(counts)
        return [sum(counts) / (len(counts) * max(1, count)) for count in counts]

    @property
    def shares(self) -> Tensor | None:
        """The share of each example, (n,): the mean size of the passes over the size of its pass.

        None if all are 1, as with passes of equal size.
        """
        return self._shares

    @cached_property
    def _shares(self) -> Tensor | None:
        if set(self.pass_shares) == {1.0}:
            return None
        pairs = zip(self.pass_shares, self.recorder.records, strict=True)
        values = [share for share, record in pairs for _ in range(record.count)]
        first = self.grads[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        return torch.tensor(values, dtype=dtype, device=first.device)

    @cached_property
    def squares(self) -> Tensor:
        """The squared joint norm of each row, (n,), in float32 or wider."""
        parts = []
        for index, share in enumerate(self.pass_shares):
            sums = [_wide(self._squares(index, param)) for param in self.params.values()]
            part = torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]
            parts.append(part / share**2 if share != 1 else part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def norms(self) -> Tensor:
        """Return the joint norm of each row, (n,)."""
        return self.squares.clamp(min=0).sqrt()

    def weighted(self, weights: Tensor) -> list[Tensor]:
        """Return the sum of the rows times share and `weights` (n,), for each parameter."""
        self.factors.append(weights)
        return self._weighted(weights)

    def _weighted(self, weights: Tensor) -> list[Tensor]:
        parts = weights.split([record.count for record in self.recorder.records])
        totals = []
        for param in self.params.values():
            total = self._sum(0, param, parts[0].to(param.dtype))
            for index, part in enumerate(parts[1:], 1):
                total = total + self._sum(index, param, part.to(param.dtype))
            totals.append(total)
        return totals

    def rows(self, scale: float) -> Iterator[list[Tensor]]:
        """Yield the rows times `scale`, some examples at a time: (k, *shape) for each parameter.

        All rows together could exceed the memory: there are at most `ENTRIES` entries at a time.
        """
        width = sum(param.numel() for param in self.params.values())
        size = max(1, ENTRIES // max(1, width))
        for index, record in enumerate(self.recorder.records):
            factor = scale / self.pass_shares[index]
            for start in range(0, record.count, size):
                part = slice(start, start + size)
                yield [self._rows(index, param, part, factor) for param in self.params.values()]

    def check_sum(self) -> None:
        """Wait for the device; raise ValueError if the rows do not sum to the gradients."""
        first = self.grads[0]
        sums = self._weighted(torch.ones(self.count, dtype=first.dtype, device=first.device))
        errors = [(total - grad).norm() for total, grad in zip(sums, self.grads, strict=True)]
        squares = self.squares if self.shares is None else self.squares * self.shares.square()
        limit = TOLERANCE.get(first.dtype, 5e-2) * squares.sum().sqrt()
        wrong = [
            name
            for name, is_right in zip(self.params, torch.stack(errors) <= limit, strict=True)
            if not is_right
        ]
        if wrong and bool(limit.isfinite()):
            raise ValueError(
                "PerSample: the gradients of the single examples do not sum to the gradient of "
                f"{shortened(wrong)}: another backward pass or hook changed it, the parameter is "
                "also used outside its module's forward, or the model mixes the examples of a batch"
            )

    def check_first_example(self) -> None:
        """Raise ValueError if the first example has another gradient in a batch of its own.

        The check is left out if the model draws random numbers, or if its modules have other hooks.
        It waits for the device.
        """
        record, model = self.recorder.records[0], self.recorder.model()
        calls = [] if model is None else record.units.get(model, [])
        if model is None or len(calls) != 1 or self.recorder.has_other_hooks():
            return
        call = _example_of(calls[0], record.count)
        if call is None or _draws(call):
            return
        alone = _call_rows(call, self.params, 1, "the whole model")
        pairs = [
            (self._rows(0, param, slice(1)), alone[site]) for site, param in self.params.items()
        ]
        error = torch.stack([(row - own).norm() for row, own in pairs]).norm()
        size = torch.stack([own.norm() for _, own in pairs]).norm()
        if error > 2 * TOLERANCE.get(self.grads[0].dtype, 5e-2) * size:
            raise ValueError(
                "PerSample: the first example of the batch has another gradient than in a batch of "
                "its own. The model mixes the examples of a batch, or the first axis of a tensor "
                "does not have the examples"
            )

    def merged(self, aggregator: Aggregator, context: TransformContext) -> list[Tensor]:
        """Return the aggregate of the rows, for each parameter.

        An aggregator that needs the Gramian alone gets it without the rows. They are made only if
        they are so nearly dependent that the Gramian does not determine the update.
        """
        of_step = AggregatorContext(context.step, context.seed, context.key)
        state = aggregator.init(self.count)
        with autograd.without_autocast(self.grads):
            if isinstance(aggregator, GramianAggregator):
                gramian = self.gramian()
                if not needs_rows(aggregator, gramian):
                    weights = checked_update(aggregator, gramian, state, of_step)[0]
                    if not cancels(weights, gramian):
                        weights = weights.to(self.grads[0].device)
                        return self._weighted(weights / (1 if self.shares is None else self.shares))
            parts, joint = self._matrices()
            grads = aggregate(aggregator, joint, state, of_step).grads
        if len(joint) < len(parts):
            grads = grads[0].split([part.shape[1] for part in parts])
        return [
            grad.view(param.shape) for grad, param in zip(grads, self.params.values(), strict=True)
        ]

    def gramian(self) -> Tensor:
        """Return the Gramian of the rows without their shares, (n, n) in float64 on the CPU.

        For a layer with a rule it is computed from the inputs and output gradients where this is
        cheaper than from the rows, which are made for one parameter at a time.
        """
        total = torch.zeros(self.count, self.count, dtype=torch.float64)
        for param in self.params.values():
            uses = self._uses[0][param]
            if len(self.recorder.records) == 1 and len(uses) == 1:
                total += uses[0].rule.gramian(uses[0].call, uses[0].name)
            else:
                total += gramian_of([torch.cat([flat(rows) for rows in self._all_rows(param)])])
        return total

    def _all_rows(self, param: nn.Parameter) -> Iterator[Tensor]:
        """Yield the rows of a parameter without their shares, for each backward pass."""
        for index, share in enumerate(self.pass_shares):
            yield self._rows(index, param, scale=1 / share)

    def _matrices(self) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Return the rows of each parameter (n, entries), and the blocks that hold them: one if all
        parameters have one dtype and device."""
        params = list(self.params.values())
        sizes = [param.numel() for param in params]
        if len({(param.dtype, param.device) for param in params}) == 1:
            joint = [params[0].new_empty(self.count, sum(sizes))]
            parts: Sequence[Tensor] = joint[0].split(sizes, dim=1)
        else:
            parts = joint = [param.new_empty(self.count, param.numel()) for param in params]
        start = 0
        for some in self.rows(1.0):
            for part, rows in zip(parts, some, strict=True):
                part[start : start + len(rows)] = flat(rows)
            start += len(some[0])
        return parts, joint

    @cached_property
    def _uses(self) -> list[dict[nn.Parameter, list[_Use]]]:
        """For each record, the uses of each parameter in layers with a rule."""
        records = []
        for record in self.recorder.records:
            uses: dict[nn.Parameter, list[_Use]] = {param: [] for param in self.params.values()}
            for layer, calls in record.layers.items():
                rule = rule_of(layer)
                assert rule is not None
                for name, param in layer.named_parameters(recurse=False, remove_duplicate=False):
                    if param in uses:
                        uses[param] += [_Use(rule, call, name) for call in calls]
            records.append(uses)
        return records

    @cached_property
    def _unit_rows(self) -> list[dict[nn.Parameter, Tensor]]:
        """For each record, the rows of the parameters that no layer with a rule uses."""
        return [
            _rows_of_units(self.recorder, record, {
                name: param for name, param in self.params.items() if not uses[param]
            })
            for record, uses in zip(self.recorder.records, self._uses, strict=True)
        ]  # fmt: skip

    def _rows(
        self, index: int, param: nn.Parameter, part: slice = WHOLE, scale: float = 1.0
    ) -> Tensor:
        """Return some rows of a parameter in one record, times share and `scale`."""
        uses = self._uses[index][param]
        if not uses:
            rows = self._unit_rows[index][param][part]
            return rows * scale if scale != 1 else rows
        terms = [use.rule.rows(_part(use.call, part, scale), use.name) for use in uses]
        return reduce(add, terms)

    def _squares(self, index: int, param: nn.Parameter) -> Tensor:
        """Return the squared norm of each row, times its share, of a parameter in one record."""
        uses = self._uses[index][param]
        if len(uses) == 1:
            return uses[0].rule.squares(uses[0].call, uses[0].name)
        return flat(self._rows(index, param)).square().sum(1)

    def _sum(self, index: int, param: nn.Parameter, weights: Tensor) -> Tensor:
        """Return the sum of the rows of a parameter in one record, times share and `weights`."""
        uses = self._uses[index][param]
        if not uses:
            rows = self._unit_rows[index][param]
            return (weights @ flat(rows)).view(rows.shape[1:])
        total = uses[0].rule.weighted(uses[0].call, uses[0].name, weights)
        for use in uses[1:]:
            total = total + use.rule.weighted(use.call, use.name, weights)
        return total


def _example_of(call: UnitCall, count: int) -> UnitCall | None:
    """Return the call with its first example alone, None if an output has none."""

    def first(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count:
            return leaf.detach()[:1]
        return leaf

    if any(not grad.ndim or len(grad) != count for grad in call.grads.values()):
        return None
    args, kwargs = pytree.tree_map(first, (call.args, call.kwargs))
    grads = {place: grad[:1] for place, grad in call.grads.items()}
    return UnitCall(call.module, args, kwargs, grads)


def _draws(call: UnitCall) -> bool:
    """Whether two calls of the model with the same input have different outputs."""

    def outputs(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        buffers = {name: buffer.clone() for name, buffer in call.module.named_buffers()}
        return list(tensors_in(functional_call(call.module, buffers, call.args, call.kwargs)))

    device = next(call.module.parameters()).device
    with random_state.preserved(device), torch.no_grad():
        pairs = zip(outputs(0), outputs(1), strict=True)
        return not all(torch.equal(one, two) for one, two in pairs)


def _reduction_doubt(examples: ExampleGradients, is_mean: bool) -> str:
    """Return a warning if the outputs' gradients do not fit the declared reduction.

    The gradient of a cross-entropy by the outputs sums to zero and has a 1-norm of at most 2.
    """
    record, model = examples.recorder.records[0], examples.recorder.model()
    calls = [] if model is None else record.units.get(model, [])
    if len(calls) != 1 or len(calls[0].grads) != 1 or examples.count < 4:
        return ""
    grad = next(iter(calls[0].grads.values())).float()
    if grad.ndim != 2 or grad.shape[1] < 2 or not bool(grad.isfinite().all()):
        return ""
    size = grad.abs().sum(1)
    scale = record.count * len(examples.recorder.records)  # to the gradient of one example's loss
    if bool((grad.sum(1).abs() > 1e-4 * size).any()) or not bool(size.any()):
        return ""
    largest = float(size.max())
    if is_mean and largest * scale > 2.01:
        other = "sum"
    elif not is_mean and largest * scale <= 2.01:
        other = "mean"
    else:
        return ""
    declared = "mean" if is_mean else "sum"
    return (
        f"PerSample: reduction='{declared}', and the gradients of the outputs look like a "
        f"cross-entropy that is the {other} over the batch. Is it reduction='{other}'?"
    )


def _part(call: LayerCall, part: slice, scale: float) -> LayerCall:
    if part is WHOLE and scale == 1:
        return call
    grad = call.grad[part]
    return LayerCall(call.layer, call.inputs[part], grad * scale if scale != 1 else grad)


@torch.no_grad()
def _measured(examples: ExampleGradients, is_mean: bool) -> Tensor:
    """Return the first five of `NUMBERS`, tr(S), |G|² and 1 for one step, on the device."""
    count = examples.count
    scale = count if is_mean else 1
    # The number of examples of equal weight whose mean has the same variance.
    pairs = zip(examples.pass_shares, examples.recorder.records, strict=True)
    effective = count**2 / sum(record.count * share**2 for share, record in pairs)
    shares = 1 if examples.shares is None else examples.shares
    squares = examples.squares * scale**2
    norms = squares.sqrt()
    levels = torch.tensor([0.5, 0.9], dtype=norms.dtype, device=norms.device)
    mean = (
        torch.stack([grad.norm() for grad in examples.grads]).square().sum() * (scale / count) ** 2
    )
    each = (squares * shares).mean()
    trace = (each - mean) * effective / (effective - 1)
    square = (effective * mean - each) / (effective - 1)
    factors = examples.factors
    changed = (factors[-1] != 1).to(norms.dtype).mean() if factors else norms.new_tensor(torch.nan)
    parts = [norms.mean(), *norms.quantile(levels), norms.max(), changed, trace, square]
    return torch.stack([*parts, norms.new_ones(())])


def _named(sums: Tensor) -> dict[str, float]:
    *totals, trace, square, steps = sums.tolist()
    scale = trace / square if square > 0 else nan
    values = [*(total / steps for total in totals), scale]
    return {name: value for name, value in zip(NUMBERS, values, strict=True) if value == value}


def _rows_of_units(
    recorder: Recorder, record: BackwardRecord, params: Mapping[str, nn.Parameter]
) -> dict[nn.Parameter, Tensor]:
    """Compute the rows of parameters that no layer with a rule uses, by `vmap`.

    Each is differentiated in the innermost module that was recorded as a unit and owns it,
    otherwise in the whole model. Raises ValueError, with the names, if that is not possible.
    """
    model = recorder.model()
    assert model is not None
    if not params:
        return {}
    # Innermost first: a module's path is longer than the paths of the modules that contain it.
    paths = {module: name for name, module in model.named_modules()}
    units = sorted(record.units, key=lambda module: -len(paths.get(module, "")))
    chosen: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for site, param in params.items():
        unit = next(
            (unit for unit in units if any(own is param for own in unit.parameters())), None
        )
        if unit is None:
            raise ValueError(
                f"PerSample: '{site}' got a gradient of no recorded batch. The first axis of the "
                "model's input must have the examples"
            )
        name = next(name for name, own in unit.named_parameters() if own is param)
        chosen.setdefault(unit, {})[name] = param
    rows: dict[nn.Parameter, Tensor] = {}
    for unit, inner in chosen.items():
        where = f"'{paths[unit]}' ({type(unit).__name__})" if paths.get(unit) else "the whole model"
        recurrent = next((part for part in unit.modules() if isinstance(part, nn.RNNBase)), None)
        if recurrent is not None:
            kind = type(recurrent).__name__
            raise ValueError(
                f"PerSample: leave out {shortened(inner)}: vmap has no rule for {kind}"
            )
        for call in record.units[unit]:
            for name, more in _call_rows(call, inner, record.count, where).items():
                param = inner[name]
                rows[param] = rows[param] + more if param in rows else more
    return rows


def _call_rows(
    call: UnitCall, params: Mapping[str, nn.Parameter], count: int, where: str
) -> dict[str, Tensor]:
    """Return the rows of one call of a unit, by name."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    places = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count
    ]
    batched = [leaves[index].detach() for index in places]
    values = {name: param.detach() for name, param in params.items()}

    def single(inputs: list[Tensor], grads: dict[int, Tensor]) -> dict[str, Tensor]:
        merged = list(leaves)
        for index, leaf in zip(places, inputs, strict=True):
            merged[index] = leaf.unsqueeze(0)
        args, kwargs = pytree.tree_unflatten(merged, structure)

        def run(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
            output = list(tensors_in(functional_call(call.module, values, args, kwargs)))
            return tuple(output[place] for place in grads)

        pull = vjp(run, values)[1]
        return pull(tuple(grad.unsqueeze(0) for grad in grads.values()))[0]

    names = ", ".join(params)
    if any(not grad.ndim or len(grad) != count for grad in call.grads.values()):
        raise ValueError(
            f"PerSample: {names}: an output of {where} has no axis of {count} examples first"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            return vmap(single, randomness="error")(batched, call.grads)
    except RuntimeError as error:  # PyTorch's own refusals: randomness, no rule for an operation
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"PerSample: {names}: {where} is differentiated for each example by vmap, which "
            f"refuses: {first}"
        ) from error


def _wide(squares: Tensor) -> Tensor:
    return squares if squares.dtype is torch.float64 else squares.float()
