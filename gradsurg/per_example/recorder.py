"""Record the inputs and output gradients of layers in each backward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from gradsurg.per_example.layers import LayerCall, Rule, rule_of
from gradsurg.sites.calls import remove_hook
from gradsurg.torch_internals import autograd, compiling
from gradsurg.torch_internals.hook_tables import number_of_forward_hooks


@dataclass(slots=True, eq=False)
class UnitCall:
    """One call of a module: its arguments, and the gradients of the tensors in its output."""

    module: nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]
    grads: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class BackwardRecord:
    """All calls of one backward pass, of `count` examples."""

    count: int
    layers: dict[nn.Module, list[LayerCall]] = field(default_factory=dict)
    units: dict[nn.Module, list[UnitCall]] = field(default_factory=dict)


class Recorder:
    """Hooks on a model's modules, and the records of the backward passes since `clear`.

    The calls of layers with a rule are recorded as LayerCalls. Those of the model itself and of
    other modules with parameters of their own are recorded as UnitCalls. The first axis of every
    tensor has the examples; a layer whose input has another length there is not recorded.
    """

    def __init__(self, model: nn.Module, stack: ExitStack) -> None:
        self.model = ref(model)
        self.records: list[BackwardRecord] = []
        self.is_on = True
        self._open: BackwardRecord | None = None
        self._num_hooks = 0
        self._count = 0  # examples of the forward that runs
        self._batched: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        stack.callback(self._detach)
        self._hook(model, stack, model.register_forward_pre_hook, self._begin)
        for module in model.modules():
            owns = any(True for _ in module.parameters(recurse=False))
            rule = rule_of(module)
            if rule is not None:
                self._hook(module, stack, module.register_forward_hook, self._layer(rule))
            if module is model or (owns and rule is None):
                self._hook(module, stack, module.register_forward_hook, self._unit)

    def clear(self) -> None:
        """Drop all records."""
        self.records = []
        self._open = None

    def has_other_hooks(self) -> bool:
        """Whether modules of the model have forward hooks besides those of this recorder."""
        model = self.model()
        modules = () if model is None else model.modules()
        hooks = sum(map(number_of_forward_hooks, modules))
        return hooks > self._num_hooks

    def _name(self, module: nn.Module) -> str:
        model = self.model()
        names = {} if model is None else {own: name for name, own in model.named_modules()}
        return names.get(module, "")

    def _detach(self) -> None:
        self.is_on = False
        self.clear()

    def _hook(
        self,
        module: nn.Module,
        stack: ExitStack,
        register: Callable[..., Any],  # Any: the handle of a hook
        record: Callable[..., None],
    ) -> None:
        held = ref(module)

        @compiling.untraced
        def hook(called: nn.Module, *given: object) -> None:
            if self.is_on and called is held() and not autograd.in_functorch():
                record(called, *given)

        stack.callback(remove_hook, register(hook, with_kwargs=True))
        self._num_hooks += 1

    def _begin(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not autograd.in_backward() and self._open is not None:  # that backward has failed
            self.records.remove(self._open)
            self._open = None
        first = next((value for value in (*args, *kwargs.values()) if _has_axes(value)), None)
        self._count = len(first) if first is not None else 0

    def _layer(self, rule: Rule) -> Callable[..., None]:
        def record(
            layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
        ) -> None:
            inputs = args[0] if args else kwargs["input"]
            count = self._count
            if not torch.is_grad_enabled():
                return
            if reason := rule.refusal(layer):
                raise ValueError(
                    f"PerSample: {type(layer).__name__} '{self._name(layer)}' has no gradients of "
                    f"single examples: {reason}"
                )
            if output.grad_fn is None or len(inputs) != count:
                return
            batched = self._batched.get(layer)
            if batched is None:  # asked once, as the answer may wait for the device
                batched = self._batched[layer] = rule.is_batched(layer, inputs)
            if not batched:
                return
            inputs, index = inputs.detach(), output.output_nr

            def arrive(grads: Sequence[Tensor | None]) -> None:
                grad = grads[index]
                if grad is not None and self.is_on:
                    calls = self._record(count).layers.setdefault(layer, [])
                    calls.append(LayerCall(layer, inputs, grad.detach()))

            # The tensor's own hooks, which may change the gradient, run before a hook of its node.
            output.grad_fn.register_prehook(arrive)

        return record

    def _unit(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        output: object,
    ) -> None:
        count, outputs = self._count, list(tensors_in(output))
        if not any(_has_axes(value) and len(value) == count for value in (*args, *kwargs.values())):
            return
        call = UnitCall(module, args, kwargs)
        for place, tensor in enumerate(outputs):
            if tensor.grad_fn is None:
                continue
            node, index = tensor.grad_fn, tensor.output_nr

            def arrive(
                grads: Sequence[Tensor | None], place: int = place, index: int = index
            ) -> None:
                grad = grads[index]
                if grad is None or not self.is_on:
                    return
                if not call.grads:
                    self._record(count).units.setdefault(module, []).append(call)
                call.grads[place] = grad.detach()

            node.register_prehook(arrive)

    def _record(self, count: int) -> BackwardRecord:
        """Return the record of the running backward pass, for a forward of `count` examples."""
        record = self._open
        if record is None:
            record = self._open = BackwardRecord(count)
            self.records.append(record)
            autograd.at_end_of_backward(self._close)
        if record.count != count:
            raise RuntimeError(
                f"PerSample: one backward pass has batches of {record.count} and of {count} "
                "examples; call backward for each forward"
            )
        return record

    def _close(self) -> None:
        if not autograd.in_inner_backward():
            self._open = None


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of a module's output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _has_axes(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim > 0
