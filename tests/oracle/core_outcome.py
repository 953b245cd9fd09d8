"""The outcome of one cell: a training run under a surgery, observed from outside."""

import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsurg as gs


@dataclass(frozen=True)
class Cell:
    """A combination to run; `row` and `column` place it in the table that is printed."""

    row: str
    column: str
    detail: str
    run: "Callable[[Observed], None]"

    @property
    def key(self) -> str:
        """The name of the cell in messages."""
        return f"{self.row} | {self.column} | {self.detail}"


@dataclass
class Outcome:
    """Everything that is compared; `acts` says that a transform or an aggregator has acted.

    `fault` is an exception raised by the oracle itself: on both sides, it is the oracle's fault.
    """

    refused: str = ""
    fault: str = ""
    acts: bool = False
    weights: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, dict[str, object]] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    hooks_left: int = 0
    notes: dict[str, object] = field(default_factory=dict)


class Observed:
    """Collects the outcome of a cell while it runs."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._watched: list[tuple[nn.Module, tuple[Optimizer, ...], int]] = []
        self._names: set[str] = set()

    def watch(self, model: nn.Module, *optimizers: Optimizer) -> None:
        """Count the hooks before the surgery is attached."""
        self._watched.append((model, optimizers, num_hooks(model, optimizers)))
        self._names |= {name for name, _ in [*model.named_parameters(), *model.named_modules()]}

    def note(self, name: str, value: object) -> None:
        """Add a tensor, a number, a text or a list of such to the outcome."""
        if isinstance(value, list):
            for number, part in enumerate(value):
                self.note(f"{name} {number}", part)
        else:
            self.outcome.notes[name] = whole(value) if isinstance(value, Tensor) else value

    def take(self, surgery: gs.Surgery, live: gs.Live) -> None:
        """Take the rows of effects, the numbers of conflicts and the states."""
        rows = live.effects.rows()
        for row in rows:
            self.outcome.rows[f"{row['transform']} at {row['site']}"] = row
        names = (f"{row['site']}" for row in rows)
        self._names |= set(names)
        state = surgery.state_dict()
        self.note("clock", [state[key] for key in ("step", "epoch", "backwards")])
        self._take_states(state["states"])
        if any(isinstance(item.at, gs.SharedParameters) for item in surgery.interventions):
            self.outcome.rows["conflicts"] = dict(live.conflicts.numbers())
        self.outcome.acts |= bool(self.outcome.rows)

    def _take_states(self, states: object) -> None:
        assert isinstance(states, Mapping)
        for place, state in states.items():
            for key, tensor in state.items():
                self.outcome.states[f"{place}.{key}"] = whole(tensor)

    def finish(self, caught: Iterable[warnings.WarningMessage]) -> None:
        """Take the weights, the hooks left and the warnings."""
        for model, optimizers, before in self._watched:
            self.outcome.hooks_left += num_hooks(model, optimizers) - before
            for name, tensor in model.state_dict().items():
                self.outcome.weights[f"{len(self.outcome.weights)} {name}"] = whole(tensor)
        texts = {str(each.message) for each in caught if each.category is gs.SurgeryWarning}
        self.outcome.warnings = sorted(f"at {self._sites_in(text)}" for text in texts)

    def _sites_in(self, text: str) -> str:
        """The names of parameters, modules and sites that a warning mentions, in order."""
        tokens = [token.strip("'\"()[],.;:") for token in re.split(r"[\s,=]+", text)]
        names = {name for name in self._names if "_" in name or "." in name or "#" in name}
        found = (token for token in tokens if token in names or token.split("#")[0] in names)
        return ", ".join([*sorted(set(found)), *(["..."] * ("... and " in text))])


def whole(tensor: Tensor) -> Tensor:
    """A plain tensor without a graph, of a sharded one the whole."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def num_hooks(model: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Count the hooks of modules, parameters, optimizers, the process, and open modes."""
    owners = [*model.modules(), *optimizers, nn.modules.module, sys.modules[Optimizer.__module__]]
    tables = [
        table
        for owner in owners
        for name, table in vars(owner).items()
        if name.endswith("_hooks") and isinstance(table, dict)
    ]
    for param in model.parameters():
        tables += [param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)]
    modes = torch._C._len_torch_function_stack()
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return sum(len(table) for table in tables if table) + modes + saving


def outcome_of(cell: Cell) -> Outcome:
    """Run a cell. An exception is its refusal; a plain step after it shows hooks that are left."""
    torch.manual_seed(0)
    random.seed(0)
    if "compile" in cell.column:
        torch._dynamo.reset()
    observed = Observed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            cell.run(observed)
        except Exception as error:  # a surgery, or PyTorch, refuses in many ways
            last = traceback.extract_tb(error.__traceback__)[-1]
            observed.outcome.refused = type(error).__name__
            if Path(last.filename).parent == Path(__file__).parent:
                observed.outcome.fault = f"{error!r} in line {last.lineno} of {last.filename}"
        observed.finish(caught)
    observed.outcome.notes["global generator"] = torch.rand(1)
    return observed.outcome
