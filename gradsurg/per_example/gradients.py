"""Gradients of single examples for a group of parameters: rows, norms and weighted sums."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from gradsurg.aggregators.base import Aggregator, AggregatorContext
from gradsurg.hooks.controller import Session
from gradsurg.multitask.aggregation import aggregate
from gradsurg.per_example.layers import LayerCall, Rule, rule_of
from gradsurg.per_example.recorder import BackwardRecord, Recorder, UnitCall, tensors_in
from gradsurg.sites.selection import params_of
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import TransformContext

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Largest distance of the sum of the rows from the gradient, relative to the rows' joint norm."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A parameter's use in one layer: the rule, the call and the parameter's name there."""

    rule: Rule
    call: LayerCall
    name: str


class ExampleSource:
    """Makes the gradients of the examples of each step, and checks those of the first one."""

    def __init__(self, model: nn.Module, session: Session, stack: ExitStack) -> None:
        self.recorder = Recorder(model, stack)
        self.session = session
        self._is_checked = False

    def of_group(self, sites: Sequence[str], grads: Sequence[Tensor]) -> "ExampleGradients":
        """Return the gradients of the examples for the parameters with these names.

        `grads` are the parameters' own gradients. They are compared with the sum over the examples
        at the first call, and whenever a step has several backward passes.
        """
        if self.session.is_scaled:
            raise ValueError(
                "PerSample: gradients of single examples are recorded times the loss scale; use a "
                "precision that needs no GradScaler, as bfloat16"
            )
        if not self.recorder.records:
            raise RuntimeError(
                "PerSample: no backward pass of the model was recorded in this step: call the "
                "model itself, with the batch as the first axis of its first tensor"
            )
        params = params_of(self.session.model)
        examples = ExampleGradients(self.recorder, {site: params[site] for site in sites})
        if not self._is_checked or len(self.recorder.records) > 1:
            examples.check_sum(grads)
            self._is_checked = True
        return examples


@dataclass(frozen=True, eq=False)
class ExampleGradients:
    """The gradients of the `count` examples of a step, for the parameters of a group.

    Rows sum to the gradient: with a loss that is the mean over the batch, row i is the gradient of
    the loss of example i, divided by the number of examples.
    """

    recorder: Recorder
    params: Mapping[str, nn.Parameter]

    @property
    def count(self) -> int:
        """The number of examples."""
        return sum(record.count for record in self.recorder.records)

    @cached_property
    def squares(self) -> Tensor:
        """The squared joint norm of each row, (n,), in float32 or wider."""
        parts = []
        for index in range(len(self.recorder.records)):
            sums = [_wide(self._squares(index, param)) for param in self.params.values()]
            parts.append(torch.stack(sums).sum(0) if len(sums) > 1 else sums[0])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def norms(self) -> Tensor:
        """Return the joint norm of each row, (n,)."""
        return self.squares.clamp(min=0).sqrt()

    def weighted(self, weights: Tensor) -> list[Tensor]:
        """Return the sum of the rows times `weights` (n,), for each parameter."""
        parts = weights.split([record.count for record in self.recorder.records])
        totals = []
        for param in self.params.values():
            total = self._sum(0, param, parts[0].to(param.dtype))
            for index, part in enumerate(parts[1:], 1):
                total = total + self._sum(index, param, part.to(param.dtype))
            totals.append(total)
        return totals

    def rows(self) -> list[Tensor]:
        """Return the rows of each parameter, (n, *shape)."""
        indices = range(len(self.recorder.records))
        return [
            torch.cat([self._rows(index, param) for index in indices])
            if len(indices) > 1
            else self._rows(0, param)
            for param in self.params.values()
        ]

    def check_sum(self, grads: Sequence[Tensor]) -> None:
        """Raise ValueError, with the names, if the rows do not sum to the gradients.

        Waits for the device.
        """
        sums = self.weighted(torch.ones(self.count, dtype=grads[0].dtype, device=grads[0].device))
        scale = self.squares.sum().sqrt()
        errors = torch.stack(
            [(total - grad).norm() for total, grad in zip(sums, grads, strict=True)]
        )
        size = max(float(scale), 1e-30)
        limit = TOLERANCE.get(grads[0].dtype, 5e-2)
        wrong = [
            name
            for name, error in zip(self.params, (errors / size).tolist(), strict=True)
            if not error <= limit
        ]
        if wrong:
            raise ValueError(
                "PerSample: the gradients of the single examples do not sum to the gradient of "
                f"{', '.join(wrong)}: another backward pass added to it, another hook changed it, "
                "or the parameter is also used outside the modules' own forward"
            )

    def merged(self, aggregator: Aggregator, context: TransformContext) -> list[Tensor]:
        """Return the aggregate of the rows, for each parameter."""
        blocks = [rows.flatten(1) for rows in self.rows()]
        alike = len({(rows.dtype, rows.device) for rows in blocks}) == 1
        parts = [torch.cat(blocks, dim=1)] if alike else blocks
        of_step = AggregatorContext(context.step, context.seed, context.site)
        with autograd.without_autocast(parts):
            grads = aggregate(aggregator, parts, aggregator.init(self.count), of_step).grads
        if alike:
            grads = list(grads[0].split([rows.shape[1] for rows in blocks]))
        return [
            grad.view(param.shape)
            for grad, param in zip(grads, self.params.values(), strict=True)
        ]

    # Helpers.

    @cached_property
    def _uses(self) -> list[dict[nn.Parameter, list[_Use]]]:
        """For each record, the uses of each parameter in layers with a rule."""
        records = []
        for record in self.recorder.records:
            uses: dict[nn.Parameter, list[_Use]] = {param: [] for param in self.params.values()}
            for layer, calls in record.layers.items():
                rule = rule_of(layer)
                assert rule is not None
                for name, param in layer._parameters.items():
                    if param is not None and param in uses:
                        uses[param] += [_Use(rule, call, name) for call in calls]
            records.append(uses)
        return records

    @cached_property
    def _unit_rows(self) -> list[dict[nn.Parameter, Tensor]]:
        """For each record, the rows of the parameters that no layer with a rule uses."""
        return [
            rows_of_units(self.recorder, record, {
                name: param for name, param in self.params.items() if not uses[param]
            })
            for record, uses in zip(self.recorder.records, self._uses, strict=True)
        ]  # fmt: skip

    def _rows(self, index: int, param: nn.Parameter) -> Tensor:
        """Return the rows of a parameter in one record."""
        uses = self._uses[index][param]
        if not uses:
            return self._unit_rows[index][param]
        rows = uses[0].rule.rows(uses[0].call, uses[0].name)
        for use in uses[1:]:
            rows = rows + use.rule.rows(use.call, use.name)
        return rows

    def _squares(self, index: int, param: nn.Parameter) -> Tensor:
        """Return the squared norm of each row of a parameter in one record."""
        uses = self._uses[index][param]
        if len(uses) == 1:
            return uses[0].rule.squares(uses[0].call, uses[0].name)
        return self._rows(index, param).flatten(1).square().sum(1)

    def _sum(self, index: int, param: nn.Parameter, weights: Tensor) -> Tensor:
        """Return the sum of the rows of a parameter in one record, times `weights`."""
        uses = self._uses[index][param]
        if not uses:
            rows = self._unit_rows[index][param]
            return (weights @ rows.flatten(1)).view(rows.shape[1:])
        total = uses[0].rule.weighted(uses[0].call, uses[0].name, weights)
        for use in uses[1:]:
            total = total + use.rule.weighted(use.call, use.name, weights)
        return total


def rows_of_units(
    recorder: Recorder, record: BackwardRecord, params: Mapping[str, nn.Parameter]
) -> dict[nn.Parameter, Tensor]:
    """Compute the rows of parameters that no layer with a rule uses, by `vmap`.

    Each is differentiated in the innermost module that was recorded as a unit and owns it, else in
    the whole model. Raises ValueError, with the names, if that is not possible.
    """
    model = recorder.model()
    assert model is not None
    if not params:
        return {}
    # Innermost first: a module is registered after those that hold it.
    paths = {module: name for name, module in model.named_modules()}
    units = sorted(record.units, key=lambda module: -len(paths.get(module, "")))
    chosen: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for site, param in params.items():
        unit = next((unit for unit in units if any(own is param for own in unit.parameters())), None)
        if unit is None:
            raise ValueError(
                f"PerSample: '{site}' got a gradient of no recorded batch: the first axis of the "
                "model's input must be that of the examples"
            )
        name = next(name for name, own in unit.named_parameters() if own is param)
        chosen.setdefault(unit, {})[name] = param
    rows: dict[nn.Parameter, Tensor] = {}
    for unit, inner in chosen.items():
        where = f"'{paths[unit]}' ({type(unit).__name__})" if paths.get(unit) else "the whole model"
        recurrent = next((part for part in unit.modules() if isinstance(part, nn.RNNBase)), None)
        if recurrent is not None:
            kind = type(recurrent).__name__
            raise ValueError(f"PerSample: {', '.join(inner)}: {kind} has no rule for vmap")
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

        _, pull = vjp(run, values)
        return pull(tuple(grad.unsqueeze(0) for grad in grads.values()))[0]

    names = ", ".join(params)
    if any(not grad.ndim or len(grad) != count for grad in call.grads.values()):
        raise ValueError(
            f"PerSample: {names}: an output of {where} has no axis of {count} examples first"
        )
    try:
        return vmap(single, randomness="error")(batched, call.grads)
    except RuntimeError as error:  # PyTorch's own refusals: randomness, no rule for an operation
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"PerSample: {names}: {where} is differentiated for each example by vmap, which "
            f"refuses: {first}"
        ) from error


def _wide(squares: Tensor) -> Tensor:
    return squares if squares.dtype is torch.float64 else squares.float()
