"""k replicas of one training as one tensor program: parameters stacked along a leading axis.

The forward is that of one model with the stacked parameters, under `vmap`, the backward one
`autograd.grad` of the sum of the k losses: the gradient of a replica's parameters is its own slice.
The optimizer steps the stacked tensors. The parameters of each replica's own model are views of its
slices, so that the model is tested, saved and examined as in a run of its own.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gradsurg.core.live import Live
from gradsurg.experiment.checkpoint import Checkpoint, TrainingState
from gradsurg.experiment.execution import OpenRun
from gradsurg.experiment.loop import concatenated
from gradsurg.stacked.acting import difference
from gradsurg.stacked.tasks import TaskRows
from gradsurg.tasks.base import MultiTask, Part
from gradsurg.torch_internals import random_state
from gradsurg.torch_internals.batching import Slots, batch_linear_layers, batched
from gradsurg.torch_internals.random_state import GeneratorStates

OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose update of an entry depends on that entry alone."""

MAX_EXAMPLES = 8192  # of one forward of all replicas in evaluation mode

MAX_DIFFERENCE = 1e-4
"""The largest difference of gradients that is taken for rounding, relative to their entries."""

MAX_ENTRIES = 1 << 24  # of the inputs and outputs of all replicas that are evaluated together


SHARED_STATE = "step"
"""The entry of an optimizer's state that is no tensor per entry: replicas have the same steps."""


class Unstackable(Exception):
    """The runs do not train in a stack as they do one by one."""


class Stack:
    """The replicas of some open runs, whose surgeries are not attached yet.

    `generators` are the states of the global random generators after each run was opened. Raises
    Unstackable if data or parameters do not fit one another.
    """

    def __init__(self, runs: Sequence[OpenRun], generators: Sequence[GeneratorStates]) -> None:
        first = runs[0]
        self.runs = runs
        self.schedule = first.run.schedule
        self._share_data()
        self._template = deepcopy(first.model).train()
        batch_linear_layers(self._template)
        self._slots, self._loss_fn = Slots(self._template), first.run.task.loss
        models = [dict(run.model.named_parameters()) for run in runs]
        if any(_shapes(model) != _shapes(models[0]) for model in models):
            raise Unstackable("the models of the runs have other parameters")
        self.params = {
            name: nn.Parameter(torch.stack([model[name].detach() for model in models]), grad)
            for name, grad in ((name, p.requires_grad) for name, p in models[0].items())
        }
        for row, model in enumerate(models):
            for name, param in model.items():
                param.data = self.params[name].detach()[row]
        self._trained = {name: p for name, p in self.params.items() if p.requires_grad}
        self._stacked = {**self.params, **_stacked_buffers([run.model for run in runs])}
        self.optimizer = self._new_optimizer(self.params)
        alone = first.run.make_optimizer(first.model)
        if _groups_of(self.optimizer, self.params) != _groups_of(alone, models[0]):
            raise Unstackable("the groups of the optimizer depend on the shapes of the parameters")
        self.lr_schedule = first.run.make_lr_schedule(self.optimizer)
        if first.checkpoint is not None:
            self._load_optimizer_states()  # also the learning rate, which the schedule has set
            if self.lr_schedule is not None and first.checkpoint["lr_schedule"] is not None:
                self.lr_schedule.load_state_dict(first.checkpoint["lr_schedule"])
        for row, run in enumerate(runs):
            run.training = _ReplicaState(
                **vars(run.training), stack=self, row=row, generators=generators[row]
            )
        self.tasks: TaskRows | None = None
        if isinstance(first.run.task, MultiTask) and any(run.run.backward_per_task for run in runs):
            self.tasks, self._losses_fn = TaskRows(first.run.task.names), first.run.task.losses
        self._compiled: Any = None  # the passes; Any: typed as a module
        self._epoch, self._indices = -1, torch.empty(0)
        batches = first.batches
        self._equal_examples = batches.order is None and all(
            bool((examples == examples[0]).all()) for examples in (batches.inputs, batches.targets)
        )
        self._metrics: dict[Part, Sequence[Mapping[str, float]]] = {}

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batches of all replicas for `step` (from 0): (k, batch size, ...)."""
        batches = self.runs[0].batches
        if self._equal_examples:
            inputs, targets = batches.inputs[: batches.size], batches.targets[: batches.size]
            count = len(self.runs)
            return inputs.expand(count, *inputs.shape), targets.expand(count, *targets.shape)
        epoch, number = divmod(step, batches.steps_per_epoch)
        if epoch != self._epoch:
            rows = [torch.stack(list(run.batches.indices(epoch))) for run in self.runs]
            self._epoch, self._indices = epoch, torch.stack(rows, dim=1)
        indices = self._indices[number]
        inputs, targets = (
            examples.index_select(0, indices.flatten()).unflatten(0, indices.shape)
            for examples in (batches.inputs, batches.targets)
        )
        return inputs, targets

    def gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses (k,) of a step, and the gradients by name: (k, *shape)."""
        tensors = list(self._stacked.values())
        if self.tasks is not None:
            losses, *grads = self._task_passes(self.tasks, inputs, targets, tensors)
        elif self._compiled is None:
            losses, *grads = self._passes(inputs, targets, tensors)
        else:
            with torch.no_grad():
                losses, *grads = self._compiled(inputs, targets, tensors)
        named = zip(self._trained, grads, strict=True)
        return losses, {name: grad for name, grad in named if grad is not None}

    def compile(
        self,
        step: int,
        compiler: Callable[[nn.Module], AbstractContextManager[nn.Module]],
        exits: ExitStack,
    ) -> float:
        """Compile the forward and backward passes, until `exits` ends; return the seconds.

        They are traced at one step: code of the model that reads the state of Python objects is
        not run again.
        """
        from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

        began = perf_counter()
        inputs, targets = self.batch(step)
        tensors = [tensor.detach() for tensor in self._stacked.values()]
        needs = [tensor.requires_grad for tensor in self._stacked.values()]

        def passes(inputs: Tensor, targets: Tensor, tensors: Sequence[Tensor]) -> list[Any]:
            leaves = (
                one.detach().requires_grad_(need) for one, need in zip(tensors, needs, strict=True)
            )
            return self._passes(inputs, targets, list(leaves))

        graph = make_fx(passes)(inputs, targets, tensors)
        self._compiled = exits.enter_context(compiler(graph))
        self.gradients(inputs, targets)
        return perf_counter() - began

    def _task_passes(
        self, tasks: TaskRows, inputs: Tensor, targets: Tensor, tensors: Sequence[Tensor]
    ) -> list[Any]:  # Any: as below
        """Return as `_passes`; keep the losses and the gradients of each task in `tasks`."""

        def losses_of(tensors: Sequence[Tensor]) -> list[Tensor]:
            inputs, targets, *own = tensors
            self._fill(own)
            return [*self._losses_fn(self._template(inputs), targets).values()]

        losses = self._batched(losses_of, [inputs, targets, *tensors])
        trained = list(self._trained.values())
        rows = [
            torch.autograd.grad(own.sum(), trained, retain_graph=True, allow_unused=True)
            for own in losses
        ]
        tasks.losses = torch.stack(losses, dim=1).detach()
        tasks.grads = dict(zip(self._trained, zip(*rows, strict=True), strict=True))
        sums = [
            reduce(add, present)
            if (present := [grad for grad in own if grad is not None])
            else None
            for own in zip(*rows, strict=True)
        ]
        return [
            reduce(add, tasks.losses.unbind(1)),
            *(grad if grad is None else grad.clone() for grad in sums),
        ]

    def _passes(
        self, inputs: Tensor, targets: Tensor, tensors: Sequence[Tensor]
    ) -> list[Any]:  # Any: a tensor, or None for a parameter without a gradient
        """Return the losses (k,) of a step, and the gradients of the parameters among `tensors`."""

        def loss(tensors: Sequence[Tensor]) -> list[Tensor]:
            inputs, targets, *own = tensors
            self._fill(own)
            return [self._loss_fn(self._template(inputs), targets)]

        (losses,) = self._batched(loss, [inputs, targets, *tensors])
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        grads = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
        # A weight's is a view of a transposed product; hooks and sums read rows of memory.
        return [losses.detach(), *(grad if grad is None else grad.contiguous() for grad in grads)]

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """Step the optimizer and its schedule."""
        for name, param in self._trained.items():
            param.grad = grads.get(name)
        self.optimizer.step()
        if self.lr_schedule is not None:
            self.lr_schedule.step()
        self._metrics = {}

    @property
    def evaluates(self) -> bool:
        """Whether the outputs of all replicas for a part of the data fit into memory."""
        data = self.runs[0].data
        inputs = max(data.train_inputs, data.test_inputs, key=len)
        entries = inputs[0].numel() + data.num_outputs * (len(inputs[0]) if data.every_step else 1)
        return len(self.runs) * len(inputs) * entries <= MAX_ENTRIES

    def metrics(self, part: Part) -> Sequence[Mapping[str, float]]:
        """Return the task's metrics of all replicas on all examples of a part."""
        if part not in self._metrics:
            first = self.runs[0]
            _, targets = first.data.part(part)
            targets = targets.to(first.run.device)
            self._metrics[part] = first.run.task.stacked_metrics(self._outputs(part), targets)
        return self._metrics[part]

    @torch.no_grad()
    def _outputs(self, part: Part) -> Tensor:
        """Return the outputs of all replicas for all examples of a part, in evaluation mode."""
        first = self.runs[0]
        inputs, _ = first.data.part(part)
        size = max(1, MAX_EXAMPLES // len(self.runs))
        pieces = inputs.to(first.run.device).split(size)

        def forward(tensors: Sequence[Tensor]) -> list[Tensor]:
            self._fill(tensors)
            return [torch.cat([concatenated(self._template(piece)) for piece in pieces])]

        self._template.eval()
        try:
            return self._batched(forward, list(self._stacked.values()))[0]
        finally:
            self._template.train()

    def first_difference(self, step: int) -> tuple[float, dict[str, Tensor]]:
        """Return the largest relative difference of replica 0's gradients at `step` from those of
        a run of its own (0: bit-identical), and the gradients of all replicas.

        Raises Unstackable if they differ by more than rounding, or if the pass of a run of its own
        changes the model or draws random numbers.
        """
        inputs, targets = self.batch(step)
        _, grads = self.gradients(inputs, targets)
        model, device = self.runs[0].model, self.runs[0].run.device
        before, generators = _pass_state(model), random_state.get_states(device)
        alone = dict(
            zip(
                self._trained,
                self._alone(inputs[0], targets[0], list(self._trained)),
                strict=True,
            )
        )
        if name := _changed(before, _pass_state(model)):
            raise Unstackable(f"the forward pass changes '{name}' of the model")
        if not random_state.equal(generators, random_state.get_states(device)):
            raise Unstackable("the forward pass draws random numbers")
        found = {name: grad for name, grad in alone.items() if grad is not None}
        if found.keys() != grads.keys():
            raise Unstackable("other parameters than in a sequential run have gradients")
        return _rounding({name: grads[name][0] for name in found}, found), grads

    def _batched(
        self, function: Callable[[Sequence[Tensor]], list[Tensor]], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return `function(tensors)` for all replicas at once."""
        try:
            return batched(function, tensors, len(self.runs))
        finally:
            self._slots.restore()

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        """Give the template the parameters and buffers of `_stacked`."""
        self._slots.fill(zip(self._stacked, tensors, strict=True))

    def _alone(self, inputs: Tensor, targets: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
        """Return the gradients of replica 0 without a stack."""
        run = self.runs[0]
        params = dict(run.model.named_parameters())
        run.model.train()
        loss = run.run.task.loss(run.model(inputs), targets)
        return torch.autograd.grad(loss, [params[name] for name in names], allow_unused=True)

    def _new_optimizer(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of stacked parameters, which have their names in the model."""
        self._slots.fill(params.items())
        try:
            return self.runs[0].run.make_optimizer(self._template)
        finally:
            self._slots.restore()

    def optimizer_state(self, row: int, params: Sequence[nn.Parameter]) -> dict[Any, Any]:
        """Return the state of one replica's optimizer, by its parameters. Any: torch's own type."""
        states = (self.optimizer.state.get(stacked) for stacked in self.params.values())
        return {
            param: {key: _slice(key, value, row) for key, value in state.items()}
            for param, state in zip(params, states, strict=True)
            if state
        }

    def _share_data(self) -> None:
        """Let all replicas use the data of the first."""
        first = self.runs[0]
        for run in self.runs[1:]:
            batches = run.batches
            for name in ("inputs", "targets"):
                if not torch.equal(getattr(batches, name), getattr(first.batches, name)):
                    raise Unstackable("the runs have other training examples")
            run.data = first.data
            inputs, targets = first.batches.inputs, first.batches.targets
            run.batches = replace(batches, inputs=inputs, targets=targets)

    def _load_optimizer_states(self) -> None:
        """Stack the states that the replicas' optimizers have from their checkpoints."""
        saved = [run.training.optimizer.state_dict() for run in self.runs]
        merged = {
            index: {
                key: value
                if key == SHARED_STATE or not isinstance(value, Tensor)
                else torch.stack([one["state"][index][key] for one in saved])
                for key, value in state.items()
            }
            for index, state in saved[0]["state"].items()
        }
        groups = [
            {**group, "params": own["params"]}
            for group, own in zip(
                saved[0]["param_groups"], self.optimizer.state_dict()["param_groups"], strict=True
            )
        ]
        self.optimizer.load_state_dict({"state": merged, "param_groups": groups})


@dataclass(frozen=True)
class _ReplicaState(TrainingState):
    """The state of one replica, whose optimizer and generators the stack has."""

    stack: Any = None  # a Stack
    row: int = 0
    generators: Any = None  # GeneratorStates

    def checkpoint(
        self, done: int, live: Live, warned: list[str], skipped: int = 0, seconds: float = 0.0
    ) -> Checkpoint:
        optimizer, stack = self.optimizer, self.stack
        params = list(self.model.parameters())
        optimizer.state.clear()
        optimizer.state.update(stack.optimizer_state(self.row, params))
        for group, stacked in zip(
            optimizer.param_groups, stack.optimizer.param_groups, strict=True
        ):
            group.update({key: value for key, value in stacked.items() if key != "params"})
        if self.lr_schedule is not None:
            self.lr_schedule.load_state_dict(stack.lr_schedule.state_dict())
        state = super().checkpoint(done, live, warned, skipped, seconds)
        optimizer.state.clear()
        own: Any = _owned({**state, "generators": self.generators})
        return own


def _rounding(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference of a gradient; Unstackable if it is above rounding.

    A gradient whose terms cancel may differ by as much as the rounding of the largest ones.
    """
    largest = max(
        (grad.abs().max().item() for grad in expected.values() if grad.numel()), default=0.0
    )
    differences = {name: difference(found[name], grad) for name, grad in expected.items()}
    for name, size in differences.items():
        if size > MAX_DIFFERENCE:
            entries = (found[name] - expected[name]).abs().max().item()
            if not entries <= MAX_DIFFERENCE * largest:
                what = f"the gradient of '{name}' in a stack"
                raise Unstackable(f"{what} differs by {size:.1e} from that of a sequential run")
    return max(differences.values(), default=0.0)


def _groups_of(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:  # Any: as torch types the options of a group
    """Return the groups of an optimizer, with the names of their parameters."""
    names = {id(param): name for name, param in params.items()}
    return [
        group | {"params": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def _pass_state(model: nn.Module) -> dict[str, object]:
    """Return copies of the buffers and numbers that a forward pass of a model could change."""
    state: dict[str, object] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        numbers = {
            key: value for key, value in vars(module).items() if isinstance(value, int | float)
        }
        state |= {f"{name}.{key}".lstrip("."): value for key, value in numbers.items()}
    return state


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return the name of the first value of a pass that differs, or ''."""
    for name in {**before, **after}:
        one, other = before.get(name), after.get(name)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if not torch.equal(one, other):
                return name
        elif one != other:
            return name
    return ""


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warning that vmap runs an operation without a rule for each replica."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


def _owned(thing: Any) -> Any:  # Any: a part of a checkpoint
    """Copy the tensors that are views: a file would hold the storage of the whole stack."""
    match thing:
        case Tensor() if thing.untyped_storage().nbytes() > thing.numel() * thing.itemsize:
            return thing.clone()
        case dict():
            return type(thing)((key, _owned(value)) for key, value in thing.items())
        case list():
            return [_owned(value) for value in thing]
        case _:
            return thing


def _slice(key: str, value: object, row: int) -> object:
    return value[row] if isinstance(value, Tensor) and key != SHARED_STATE else value


def _shapes(params: Mapping[str, nn.Parameter]) -> list[tuple[object, ...]]:
    return [(name, p.shape, p.dtype, p.requires_grad) for name, p in params.items()]


def _stacked_buffers(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers in which the models differ, stacked."""
    named = [dict(model.named_buffers()) for model in models]
    return {
        name: torch.stack([other[name] for other in named])
        for name, buffer in named[0].items()
        if not all(torch.equal(buffer, other[name]) for other in named[1:])
    }
