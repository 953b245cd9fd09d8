"""Parameters: the gradient of each parameter."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Annotated, ClassVar
from weakref import ref

from pydantic import AfterValidator
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.fields import validated
from gradsurg.sites.base import (
    Gates,
    GradFn,
    GroupFn,
    Selector,
    Stage,
    check_pattern,
    matches,
    nothing_matched,
)
from gradsurg.transforms.base import Scope


@validated
class Parameters(Selector):
    """The parameters whose name fits `pattern`, a glob or `re:`.

    Stages: `backward`, one backward's gradient before it is added to `.grad` (the default of tensor
    transforms); `accumulated`, the running sum in `.grad` after each backward; `step`, what the
    optimizer is about to use, unscaled and accumulated (the default of group transforms). A tied
    parameter is one site with several names; a frozen one is left out, and the ledger says so.
    """

    pattern: Annotated[str, AfterValidator(check_pattern)] = "*"
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("backward", "accumulated", "step")
    group_stages: ClassVar[tuple[Stage, ...]] = ("step",)
    has_value: ClassVar[bool] = True

    def find(self, model: nn.Module) -> list[str]:
        selected = self._select(model)
        if not any(param.requires_grad for param, _ in selected):
            if selected:
                frozen = ", ".join(names[0] for _, names in selected)
                raise LookupError(
                    f"Parameters: all that '{self.pattern}' matches is frozen: {frozen}"
                )
            raise nothing_matched("Parameters", self.pattern, dict(model.named_parameters()))
        return [names[0] for param, names in selected if param.requires_grad]

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: Gates,
        stack: ExitStack,
    ) -> None:
        chosen: dict[str, nn.Parameter] = {}
        for param, (name, *aliases) in self._select(model):
            skipped = "" if param.requires_grad else "frozen"
            gates.expect(name, aliases, skipped)
            if not skipped:
                chosen[name] = param
        match stage:
            case "backward":
                for name, param in chosen.items():
                    handle = param.register_hook(gates.gate(name, ref(param)))
                    stack.callback(handle.remove)
            case "accumulated":
                for name, param in chosen.items():
                    gate = _in_place_of_grad(gates.gate(name, ref(param)))
                    stack.callback(param.register_post_accumulate_grad_hook(gate).remove)
            case "step":
                if optimizer is None:
                    raise ValueError("stage 'step' needs the optimizer: attach(model, optimizer)")
                params = list(chosen.values())
                _check_owned(optimizer, chosen)
                gate_all = gates.group(list(chosen), [ref(param) for param in params])
                stack.callback(
                    optimizer.register_step_pre_hook(_before_step(params, gate_all)).remove
                )

    def _select(self, model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
        """Each parameter once, with all its names, if one of them fits."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        return [
            (param, own)
            for param, own in names.items()
            if any(matches(name, self.pattern) for name in own)
        ]


def _in_place_of_grad(gate: GradFn) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        result = gate(param.grad)
        if result is not None:
            param.grad = result

    return hook


def _before_step(params: Sequence[nn.Parameter], gate_all: GroupFn) -> Callable[..., None]:
    """The hook before a step. It dies with the block, so it may hold the parameters."""

    def hook(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:]):
            raise RuntimeError(
                "stage 'step' acts before optimizer.step(); with a closure the gradients are made "
                "inside it. Use stage='accumulated' or 'backward'."
            )
        # A fused optimizer unscales the gradients itself, after this hook.
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "stage 'step': this optimizer gets gradients that are still times the loss scale; "
                "call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        grads = [param.grad for param in params]
        results = gate_all(grads)
        if results is not grads:
            for param, result in zip(params, results, strict=True):
                param.grad = result

    return hook


def _check_owned(optimizer: Optimizer, chosen: dict[str, nn.Parameter]) -> None:
    owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
    foreign = [name for name, param in chosen.items() if id(param) not in owned]
    if foreign:
        raise ValueError(f"stage 'step': the optimizer does not have {', '.join(foreign)}")
