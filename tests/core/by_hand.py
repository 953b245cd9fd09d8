"""Hooks written by hand in plain PyTorch: what each kind of site does, without checks or counts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.modules import module as process
from torch.optim import Optimizer

import gradsurg as gs
from gradsurg.sites.places import Selector

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Hand:
    """A model with the function that acts at the modules or parameters that fit a pattern."""

    model: nn.Module
    f: Function
    optimizer: Optimizer | None
    pattern: str
    stack: ExitStack

    @cached_property
    def modules(self) -> list[nn.Module]:
        """Each module once; it is selected by any of its names. The model itself is not."""
        return list(self._selected(self.model.named_modules(remove_duplicate=False)))

    @cached_property
    def params(self) -> list[nn.Parameter]:
        named = self.model.named_parameters(remove_duplicate=False)
        return [param for param in self._selected(named) if param.requires_grad]

    @property
    def leaves(self) -> list[nn.Module]:
        return [module for module in self.modules if not [*module.children()]]

    def _selected(self, named: Iterable[tuple[str, Any]]) -> dict[Any, None]:
        short = ((name.removeprefix("_orig_mod.").removeprefix("module."), x) for name, x in named)
        return {x: None for name, x in short if name and fnmatchcase(name, self.pattern)}

    def fits(self, module: nn.Module) -> bool:
        """Whether a module of the process is selected, by its name or by its class."""
        if module in self.modules or self.pattern == _class(module):
            return True
        return self.pattern == "*" and module not in {*self.model.modules()}

    def grads(self, grads: Sequence[Tensor | None], *_: object) -> tuple[Tensor | None, ...]:
        return tuple(grad if grad is None else self.f(grad) for grad in grads)

    def write(self, param: Tensor) -> None:
        if param.grad is not None:
            param.grad = self.f(param.grad)

    def keep(self, *handles: Any) -> None:
        for handle in handles:
            self.stack.callback(handle.remove)


@contextmanager
def by_hand(
    kind: str, model: nn.Module, f: Function, optimizer: Optimizer | None = None, pattern: str = "*"
) -> Iterator[None]:
    """Let a function act where a kind of site acts, as "Nodes leave", while the block is open."""
    name, _, mode = kind.partition(" ")
    with ExitStack() as stack:
        HANDS[name](Hand(model, f, optimizer, pattern, stack), mode)
        yield


def select(kind: str, pattern: str = "*") -> Selector:
    """Return the selector of the places where `by_hand` acts."""
    name, _, mode = kind.partition(" ")
    match name, mode:
        case "Nodes", _:
            return gs.Nodes("re:Addmm|Mm|Relu|Tanh", module=pattern, side=mode)  # pyright: ignore[reportArgumentType] - tested
        case "Activations", "input":
            return gs.Activations(pattern, side="input", backward="straight")
        case "EveryModule", _ if pattern[0].isupper():  # the name of a class
            return gs.EveryModule(types=pattern, kind=mode)  # pyright: ignore[reportArgumentType] - tested
        case "SavedTensors", "node":
            return gs.SavedTensors(pattern, node="re:Addmm|Mm|Relu|Tanh")
    return getattr(gs, name)(pattern, **({FIELDS.get(name, "stage"): mode} if mode else {}))


# It depends on the sign, so that acting on two gradients is not acting on their sum, but not on the
# size, so that it is allowed under a loss scale.
SIGNS = gs.ScaleBySign(positive=0.5, negative=0.25)


def signs(grad: Tensor) -> Tensor:
    """Do what `SIGNS` does."""
    return torch.where(grad > 0, grad * 0.5, torch.where(grad < 0, grad * 0.25, grad))


FIELDS = {"Inputs": "path", "ModuleGradients": "kind", "EveryModule": "kind"}
"""The field that selects the mode of a kind."""


def _class(module: nn.Module) -> str:
    return type(module).__name__


def _parameters(hand: Hand, stage: str) -> None:
    reached: list[Tensor] = []

    def reach(param: Tensor) -> None:
        if not reached:
            Variable._execution_engine.queue_callback(end)  # pyright: ignore[reportAttributeAccessIssue] - made in C++
        reached.append(param)

    def end() -> None:
        for param in reached:
            hand.write(param)
        reached.clear()

    def write(*_: object) -> None:
        for param in hand.params:
            hand.write(param)

    match stage:
        case "backward":
            hand.keep(*(param.register_hook(hand.f) for param in hand.params))
        case "accumulated" | "sent" | "reduced":  # a single process sends nothing
            hand.keep(*(p.register_post_accumulate_grad_hook(hand.write) for p in hand.params))
        case "backward_end":
            hand.keep(*(p.register_post_accumulate_grad_hook(reach) for p in hand.params))
        case "step":
            assert hand.optimizer is not None
            hand.keep(hand.optimizer.register_step_pre_hook(write))


def _weights(hand: Hand, stage: str) -> None:
    @torch.no_grad()
    def write(module: object = None, *_: object) -> None:
        if not isinstance(module, nn.Module) or module.training:
            for param in hand.params:
                param.copy_(hand.f(param))

    if stage == "forward":
        hand.keep(hand.model.register_forward_pre_hook(write))
    else:
        assert hand.optimizer is not None
        hand.keep(hand.optimizer.register_step_post_hook(write))


def _updates(hand: Hand, _: str) -> None:
    before: list[Tensor] = []

    @torch.no_grad()
    def write(*_: object) -> None:
        for param, old in zip(hand.params, before, strict=True):
            if param.grad is not None:
                result = hand.f(update := param - old)
                param.copy_(torch.where(result == update, param, old + result))
        before.clear()

    def copy(*_: object) -> None:
        before.extend(param.detach().clone() for param in hand.params)

    assert hand.optimizer is not None
    hand.keep(hand.optimizer.register_step_pre_hook(copy))
    hand.keep(hand.optimizer.register_step_post_hook(write))


def _captured(hand: Hand, _: str) -> None:
    plain = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, **kwargs: Any) -> Any:  # Any: as PyTorch types it
        found = zip(inputs, plain(outputs, inputs, **kwargs), strict=True)
        return tuple(hand.f(g) if any(x is p for p in hand.params) else g for x, g in found)

    hand.stack.callback(setattr, torch.autograd, "grad", plain)
    torch.autograd.grad = grad


def _outputs(hand: Hand, _: str) -> None:
    def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output[...] if output is args[0] else output  # an identity returns its input
        if output.requires_grad and not output._backward_hooks:  # a container and its last child
            output.register_hook(hand.f)
        return output

    hand.keep(*(module.register_forward_hook(after) for module in hand.modules))


def _inputs(hand: Hand, path: str) -> None:
    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = args[0][...] if path == "branch" else args[0]
        is_known = bool(given._backward_hooks)
        if given.requires_grad and torch.is_grad_enabled() and not is_known:
            given.register_hook(hand.f)
        return (given,)

    hand.keep(*(module.register_forward_pre_hook(before) for module in hand.modules))


def _nodes(hand: Hand, side: str) -> None:
    """Hook the last node of each layer: Addmm of a linear one, Mm without bias, Relu, Tanh."""

    def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        node = output.grad_fn
        if node is not None and not isinstance(module, (nn.Identity, nn.Dropout)):
            node.register_prehook(hand.grads) if side == "enter" else node.register_hook(hand.grads)

    hand.keep(*(module.register_forward_hook(after) for module in hand.leaves))


def _module_gradients(hand: Hand, kind: str) -> None:
    act = lambda module, grads, *_: hand.grads(grads)  # noqa: E731
    for module in hand.modules:
        hand.keep(getattr(module, f"register_{kind}_hook")(act))


def _every_module(hand: Hand, kind: str) -> None:
    hooks: dict[str, Callable[..., Any]] = {
        "forward": lambda module, args, output: _changed(hand.f, output),
        "forward_pre": lambda module, args: (_changed(hand.f, args[0]),),
    }
    plain = hooks.get(kind, lambda module, grads, *_: hand.grads(grads))
    act = lambda module, *given: plain(module, *given) if hand.fits(module) else None  # noqa: E731
    hand.keep(getattr(process, f"register_module_{kind}_hook")(act))


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, f: Function) -> Tensor:
        return f(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _changed(f: Function, x: Any) -> Any:  # Any: it has an attribute more
    """Return the result of a function, once for a tensor that several modules pass on."""
    version = None if x.is_inference() else x._version
    if getattr(x, "changed_at", "") == version:
        return x
    result = f(x)
    result.changed_at = None if result.is_inference() else result._version
    return result


def _activations(hand: Hand, mode: str) -> None:
    def straight(x: Tensor) -> Any:  # Any: PyTorch does not type it
        return _Straight.apply(x, hand.f)

    for module in hand.modules:
        if mode == "input":
            hook = module.register_forward_pre_hook(lambda _, args: (_changed(straight, args[0]),))
        else:
            hook = module.register_forward_hook(lambda _, args, output: _changed(hand.f, output))
        hand.keep(hook)


def _is_weight(saved: Tensor) -> bool:
    """Whether a saved tensor is a parameter, its transpose or its cast."""
    node = saved.grad_fn
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return any(
        isinstance(x, nn.Parameter) for x in (saved, saved._base, getattr(node, "variable", None))
    )


def _saved_tensors(hand: Hand, mode: str) -> None:
    def pack(saved: Tensor) -> tuple[bool, Tensor]:
        return saved.is_floating_point() and not _is_weight(saved), saved.detach()

    def unpack(packed: tuple[bool, Tensor]) -> Tensor:
        return hand.f(packed[1]) if packed[0] else packed[1]

    def hook_node(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        node = output.grad_fn
        names = [name for name in dir(node) if name.startswith("_raw_saved")]
        for name in names if not isinstance(module, (nn.Identity, nn.Dropout)) else ():
            saved = getattr(node, name.removeprefix("_raw"))
            if isinstance(saved, Tensor) and pack(saved)[0]:
                getattr(node, name).register_hooks(lambda x: x.detach(), hand.f)

    open_pairs: list[saved_tensors_hooks] = []

    def enter(*_: object) -> None:
        open_pairs.append(saved_tensors_hooks(pack, unpack))
        open_pairs[-1].__enter__()

    def leave(*_: object) -> None:
        open_pairs.pop().__exit__(None, None, None)

    if mode == "node":
        hand.keep(*(module.register_forward_hook(hook_node) for module in hand.leaves))
        return
    for module in hand.modules:
        hand.keep(module.register_forward_pre_hook(enter))
        hand.keep(module.register_forward_hook(leave, always_call=True))


def _uses(hand: Hand, _: str) -> None:
    outputs: list[Tensor] = []
    running: list[nn.Module] = []

    def enter(module: nn.Module, args: object) -> None:
        if module is hand.model:  # a KeyboardInterrupt runs no forward hook
            running.clear()
            outputs.clear()
        running.append(module)

    def leave(module: nn.Module, args: object, output: Tensor | None) -> None:
        running.pop()
        if output is None or not output.requires_grad:  # the forward has raised
            return
        if module in hand.modules:
            outputs.append(output)
        if not running:  # it is the outermost call
            hook_graph(output)

    def hook_graph(output: Tensor) -> None:
        tensors = [*outputs, *hand.params]
        edges = {get_gradient_edge(tensor)[:2] for tensor in tensors}
        outputs.clear()
        seen, found = set[object](), [output.grad_fn]
        while found:
            node = found.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            found += [source for source, _ in node.next_functions]
            used = [edge in edges for edge in node.next_functions]
            if any(used):
                node.register_hook(
                    lambda grads, _, used=used: tuple(
                        hand.f(grad) if is_use and grad is not None else grad
                        for grad, is_use in zip(grads, used, strict=True)
                    )
                )

    for module in hand.model.modules():
        hand.keep(module.register_forward_pre_hook(enter))
        hand.keep(module.register_forward_hook(leave, always_call=True))


HANDS: dict[str, Callable[[Hand, str], None]] = {
    "Parameters": _parameters,
    "Buckets": _parameters,
    "Weights": _weights,
    "Updates": _updates,
    "Captured": _captured,
    "Outputs": _outputs,
    "Inputs": _inputs,
    "Nodes": _nodes,
    "ModuleGradients": _module_gradients,
    "EveryModule": _every_module,
    "Activations": _activations,
    "SavedTensors": _saved_tensors,
    "Uses": _uses,
}
