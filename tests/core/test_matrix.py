"""Every kind of site in contexts and situations, against hooks by hand in plain PyTorch."""

import copy
import gc
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as process
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.plugins.registry import find, names
from gradsurg.sites.places import Selector
from tests.contexts.contexts import PROCESSES, STEPS, column
from tests.contexts.contexts import outcome as outcome_in
from tests.contexts.kinds import KINDS as IN_TABLE
from tests.contexts.kinds import TABLE
from tests.core.by_hand import SIGNS, by_hand, select, signs
from tests.nets import COMPILES_LAYERS, num_hooks
from tests.sites.points import Acts

MODES = {
    "Parameters": ("backward", "accumulated", "backward_end", "step"),
    "Buckets": ("sent", "reduced"),
    "Weights": ("step", "forward"),
    "Updates": ("",),
    "Captured": ("",),
    "Uses": ("",),
    "Outputs": ("",),
    "Inputs": ("branch", "total"),
    "Nodes": ("enter", "leave"),
    "ModuleGradients": ("full_backward_pre", "full_backward"),
    "EveryModule": ("forward_pre", "forward", "full_backward_pre", "full_backward"),
    "Activations": ("", "input"),
    "SavedTensors": ("", "node"),
}
KINDS = [f"{name} {mode}".rstrip() for name, modes in MODES.items() for mode in modes]
OF_PARAMS = ("Parameters", "Buckets", "Weights", "Updates", "Captured")


class Net(nn.Module):
    """A module with two names, which is called twice, a tied weight, an identity, a container."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.act = nn.ReLU()
        self.one = nn.Linear(6, 6)
        self.two = self.one
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.one.weight
        self.same, self.drop = nn.Identity(), nn.Dropout(0.2)
        self.tail = nn.Sequential(OrderedDict(lin=nn.Linear(6, 6), tanh=nn.Tanh()))
        self.last = nn.Linear(6, 3)
        self.reentrant = reentrant
        self.error: BaseException | None = None

    def inner(self, x: Tensor) -> Tensor:
        h = self.act(self.one(self.act(self.first(x))))
        h = self.two(h) + self.same(h)
        if self.error is not None:
            raise self.error
        # A recomputation stops inside the last module, at the last tensor that is needed.
        return self.tail(self.drop(self.tied(h)) * h)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.inner(x))
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def batch(step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()


Make = Callable[[], Net]


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """Return all that an attachment may leave behind: hooks, modes, flags and filters."""
    global_hooks = [table for name, table in vars(process).items() if name.endswith("_hooks")]
    return (
        num_hooks(model, optimizer),
        sum(map(len, global_hooks)),
        len(vars(torch.overrides)["_get_current_function_mode_stack"]()),
        vars(torch._C._autograd)["_top_saved_tensors_default_hooks"](True),
        process._global_is_full_backward_hook,
        [module._is_full_backward_hook for module in model.modules()],
        len(warnings.filters),
    )


class Arm:
    """A model that is trained with gradsurg, by hand, or without effect; `calls` are counted."""

    def __init__(
        self, who: str, kind: str, pattern: str = "*", make: Make = Net, transform: Any = SIGNS
    ) -> None:
        self.who, self.kind, self.pattern, self.transform = who, kind, pattern, transform
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02, momentum=0.9)
        self.is_on = who == "hand"
        self.calls, self.inputs = list[int](), list[Tensor]()
        self.norms = list[tuple[Any, Any]]()  # before and after

    @contextmanager
    def attached(self, when: gs.Trigger | None = None, **kwargs: Any) -> Iterator[None]:
        """Attach gradsurg, or hooks by hand, to the model."""
        if self.who == "gradsurg":
            at, before = select(self.kind, self.pattern), hooks(self.model, self.optimizer)
            surgery = gs.Surgery(gs.Intervention(self.transform, at, when or gs.Always()))
            try:
                with surgery.attach(self.model, self.optimizer, **kwargs) as live:
                    yield
                    self.calls.append(sum(entry.calls for entry in live.ledger))
            finally:
                assert hooks(self.model, self.optimizer) == before
            rows = live.effects.rows()
            self.norms += [(row["norm_before"], row["norm_after"]) for row in rows]  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType] - numbers
            return
        norms = self.norms = []
        acted = list[None]()

        def act(grad: Tensor) -> Tensor:
            acted.append(None)  # first: a checkpoint ends a recomputation by an exception
            result = signs(grad) if self.is_on else grad
            with torch.no_grad():
                norms.append((grad.norm().item(), result.norm().item()))
            return result

        with by_hand(self.kind, self.model, act, self.optimizer, self.pattern):
            yield
            self.calls.append(len(acted))

    def backward(self, loss: Tensor, **kwargs: bool) -> None:
        if self.kind != "Captured":
            loss.backward(**kwargs)
            return
        params = [param for param in self.model.parameters() if param.requires_grad]
        for param, grad in zip(params, torch.autograd.grad(loss, params, **kwargs), strict=True):
            param.grad = grad if param.grad is None else param.grad + grad

    def compile(self) -> None:
        if self.who == "gradsurg":
            self.model.compile(backend="eager")

    def loss(self, number: int) -> Tensor:
        torch.manual_seed(number)
        x = batch(number)
        self.inputs.append(x)
        return self.model(x.to(self.model.first.weight.dtype)).square().sum()

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(self.loss(number))
        self.optimizer.step()


# The situations


def plain(arm: Arm) -> None:
    with arm.attached():
        for number in range(3):
            arm.step(number)


def attached_for_a_time(arm: Arm) -> None:
    arm.step(0)
    for number in (1, 2):
        with arm.attached():
            arm.step(number)
    arm.step(3)


def two_backward_passes_in_a_step(arm: Arm) -> None:
    with arm.attached():
        for number in range(2):
            arm.optimizer.zero_grad()
            for part in (0, 1):
                arm.backward(arm.loss(2 * number + part))
            arm.optimizer.step()


def a_gradient_from_before(arm: Arm) -> None:
    arm.backward(arm.loss(9))
    with arm.attached():
        arm.backward(arm.loss(0))
        arm.optimizer.step()


def two_graphs_at_once(arm: Arm) -> None:
    with arm.attached():
        first, second = arm.loss(0), arm.loss(1)
        arm.backward(second)
        arm.backward(first)
        arm.optimizer.step()
        arm.step(2)


def a_graph_is_used_twice(arm: Arm) -> None:
    with arm.attached():
        loss = arm.loss(0)
        arm.backward(loss, retain_graph=True)
        arm.backward(loss)
        arm.optimizer.step()


def evaluations_in_between(arm: Arm) -> None:
    with arm.attached():
        for number in range(2):
            arm.model.eval()
            with torch.no_grad():
                arm.model(batch(7))
            with torch.inference_mode():
                arm.model(batch(8).detach())
            arm.model.train()
            arm.step(number)


def a_forward_that_raises(arm: Arm) -> None:
    with arm.attached():
        for number in range(3):
            arm.model.error = (None, ArithmeticError("gone"), KeyboardInterrupt())[number]
            with suppress(ArithmeticError, KeyboardInterrupt):
                arm.step(number)
        arm.model.error = None
        arm.step(3)


def a_part_is_called_alone(arm: Arm) -> None:
    with arm.attached():
        arm.step(0)
        arm.optimizer.zero_grad()
        arm.backward(arm.loss(1) + arm.model.tail(batch(9) @ torch.ones(4, 6)).sum())
        arm.optimizer.step()


def a_frozen_layer(arm: Arm) -> None:
    arm.model.first.requires_grad_(False)
    plain(arm)


def a_step_that_a_scaler_skips(arm: Arm) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with arm.attached(scaler=scaler):
        for number in range(3):
            arm.optimizer.zero_grad()
            loss = arm.loss(number) * (float("inf") if number == 1 else 1.0)
            arm.backward(scaler.scale(loss))
            scaler.step(arm.optimizer)
            scaler.update()


def another_dtype(arm: Arm) -> None:
    arm.model.to(torch.float64)
    plain(arm)


def compiled_in_the_block(arm: Arm, before: bool = False) -> None:
    torch.compiler.reset()
    if before:
        arm.compile()
    with arm.attached():
        if not before:
            arm.compile()
        for number in range(3):
            arm.step(number)
    torch.compiler.reset()


def compiled_before_it(arm: Arm) -> None:
    compiled_in_the_block(arm, before=True)


SITUATIONS: dict[str, tuple[Callable[[Arm], None], Make]] = {
    run.__name__: (run, Net)
    for run in (
        *(plain, a_gradient_from_before, attached_for_a_time, two_backward_passes_in_a_step),
        *(two_graphs_at_once,),
        *(a_graph_is_used_twice, evaluations_in_between, a_forward_that_raises),
        *(a_part_is_called_alone, a_frozen_layer, a_step_that_a_scaler_skips, another_dtype),
    )
}
COMPILED: dict[str, tuple[Callable[[Arm], None], Make]] = {
    run.__name__: (run, Net) for run in (compiled_in_the_block, compiled_before_it)
}
SITUATIONS |= {"checkpoint": (plain, lambda: Net(False))}
SITUATIONS |= {"reentrant checkpoint": (plain, lambda: Net(True))}


def outcome(arm: Arm, run: Callable[[Arm], None]) -> list[Tensor]:
    """Return the weights and the gradients of the inputs after a situation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(arm)
    grads = [x.grad for x in arm.inputs if x.grad is not None]
    return [*(param.detach() for param in arm.model.parameters()), *grads]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    assert len(first) == len(second)
    pairs = zip(first, second, strict=True)
    return all(a.nan_to_num().equal(b.nan_to_num()) for a, b in pairs)


OTHERWISE = {
    # PyTorch raises by hand too.
    ("Weights forward", "two_graphs_at_once"),
    ("Captured", "reentrant checkpoint"),
    ("SavedTensors node", "checkpoint"),
}


@pytest.mark.parametrize(
    "situation", [*SITUATIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_site_acts_as_hooks_by_hand(kind: str, situation: str) -> None:
    run, make = (SITUATIONS | COMPILED)[situation]
    hooked, treated, plain = (Arm(who, kind, make=make) for who in ("hand", "gradsurg", "plain"))
    if (kind, situation) in OTHERWISE:
        for arm in (hooked, treated):
            with pytest.raises(RuntimeError):
                outcome(arm, run)
        return
    expected, untouched = outcome(hooked, run), outcome(plain, run)
    assert not same(untouched, expected)
    found = outcome(treated, run)
    if (kind, situation) == ("Uses", "reentrant checkpoint"):  # each recomputation is a graph
        assert not same(found, untouched)
        return
    assert same(found, expected)
    assert treated.calls == hooked.calls


# The contexts of the table in the README of the sites


def test_every_kind_is_in_the_matrix_and_in_the_table() -> None:
    kinds = {find("sites", stem).__name__ for stem in names("sites")} - {"Combined"}
    assert {*MODES} == kinds == {kind.partition(" ")[0] for kind in TABLE}
    assert {context for cells in TABLE.values() for context in cells} == {*STEPS}


UNNAMED = {
    # PyTorch's own errors.
    *(("in-place consumer", f"ModuleGradients {kind}") for kind in MODES["ModuleGradients"]),
    ("in-place consumer", "EveryModule full_backward_pre"),
    ("torch.func", "SavedTensors"),
    # Nodes are known once there is a graph.
    *((context, f"Nodes {side}") for context in ("no_grad", "deepcopy") for side in MODES["Nodes"]),
}


@pytest.mark.parametrize("kind", IN_TABLE)
@pytest.mark.parametrize(
    "context",
    [
        pytest.param(context, marks=[pytest.mark.slow] if "compile" in context else [])
        for context in STEPS
        if context not in PROCESSES
    ],
)
def test_a_kind_of_site_has_the_stated_outcome_in_a_context(kind: str, context: str) -> None:
    measured, text = outcome_in(IN_TABLE[kind], context)
    in_eager = "Nodes" in kind and context == INSIDE and not COMPILES_LAYERS
    assert measured == ("acts" if in_eager else TABLE[kind][context]), text
    if measured in ("refused", "warned", "reported") and (context, kind) not in UNNAMED:
        name = IN_TABLE[kind].pattern
        assert (name if name != "ReLU" else "act") in text or f"{kind.partition(' ')[0]}: " in text


INSIDE = "torch.compile after attaching"


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(context, marks=pytest.mark.full if context == "torchrun" else pytest.mark.slow)
        for context in PROCESSES
    ],
)
def test_kinds_of_sites_have_the_stated_outcomes_in_several_processes(context: str) -> None:
    assert column(context) == {kind: cells[context] for kind, cells in TABLE.items()}


# Names, triggers, several interventions, changes, states, effects

PATTERNS = ["first", "[ot][nw][eo]", "tied", "same", "tail", "tail.lin", "ta*", "last"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
def test_modules_and_parameters_are_selected_by_name(kind: str, pattern: str) -> None:
    if kind.startswith(OF_PARAMS):
        pattern += ".*" if pattern == "tail" else ".weight"
    hooked, treated = (Arm(who, kind, pattern, Net) for who in ("hand", "gradsurg"))
    expected = outcome(hooked, plain)
    # An identity has no parameter and makes no node, a container neither.
    with suppress(LookupError, ValueError) if hooked.calls == [0] else nullcontext():
        assert same(outcome(treated, plain), expected)
        assert treated.calls == hooked.calls


def one_step(arm: Arm) -> None:
    with arm.attached():
        arm.step(0)


def every_second(arm: Arm) -> None:
    with arm.attached(gs.Every(2)):
        for number in range(4):
            arm.is_on = number % 2 == 0
            arm.step(number)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trigger_says_when_it_acts(kind: str) -> None:
    hooked, treated = (Arm(who, kind) for who in ("hand", "gradsurg"))
    assert same(outcome(treated, every_second), outcome(hooked, every_second))


def steps(arm: Arm, *items: gs.Intervention, change: Callable[[gs.Live, int], None]) -> None:
    with gs.Surgery(*items).attach(arm.model, arm.optimizer) as live:
        for number in range(4):
            change(live, number)
            arm.step(number)


@pytest.mark.parametrize("kind", KINDS)
def test_interventions_change_between_steps(kind: str) -> None:
    """In the steps 0 to 3: one, two in their order, the second with another field, the first."""
    at = select(kind, "[fl]*")
    first = gs.Intervention(SIGNS, at, names=("first",))
    second = gs.Intervention(gs.ScaleBySign(-1.0, 1.0), at, names=("second",))
    is_single = kind == "SavedTensors node"  # PyTorch takes one pair of hooks for a tensor

    def by_surgery(arm: Arm) -> None:
        with gs.Surgery(first).attach(arm.model, arm.optimizer) as live:
            arm.step(0)
            if is_single:
                live.remove("first")
            live.add(second)
            arm.step(1)
            live.set("second", negative=0.5)
            arm.step(2)
            live.remove("second")
            if is_single:
                live.add(first)
            arm.step(3)

    def by_hands(arm: Arm) -> None:
        for number, negative in enumerate((None, 1.0, 0.5, None)):

            def act(grad: Tensor, negative: float | None = negative) -> Tensor:
                grad = grad if is_single and negative is not None else signs(grad)
                if negative is None:
                    return grad
                scaled = torch.where(grad < 0, grad * negative, grad)
                return torch.where(grad > 0, grad * -1.0, scaled)

            with by_hand(kind, arm.model, act, arm.optimizer, "[fl]*"):
                arm.step(number)

    hooked, treated = (Arm(who, kind) for who in ("hand", "gradsurg"))
    expected, found = outcome(hooked, by_hands), outcome(treated, by_surgery)
    if kind == "Updates":  # of two surgeries; the update is rounded between them
        torch.testing.assert_close(found, expected)
    else:
        assert same(found, expected)


OF_ONE = gs.Chain(gs.Momentum(0.5), gs.AddNoise(sigma=0.01))
OF_GROUP = gs.Chain(gs.Momentum(0.5), gs.Scheduled(gs.ClipGlobalNorm(0.1), steps=4))
GROUPS = (
    "Parameters backward_end",
    "Parameters step",
    "Weights step",
    "Weights forward",
    "Updates",
)


@pytest.mark.parametrize(
    ("kind", "transform"),
    [
        *((kind, OF_ONE) for kind in KINDS if not kind.startswith("SavedTensors")),
        *((kind, OF_GROUP) for kind in GROUPS),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value.links[1]).__name__,
)
def test_states_go_on_in_another_surgery(kind: str, transform: gs.Chain) -> None:
    """Two steps, and two of a new surgery that has loaded the state, are four steps."""

    def train(arm: Arm, parts: int, loads: bool = True) -> None:
        state = None
        for part in range(parts):
            item = gs.Intervention(transform, select(kind), gs.Every(2, offset=1))
            surgery = gs.Surgery(item, seed=3)
            if state is not None and loads:
                surgery.load_state_dict(state)
            with surgery.attach(arm.model, arm.optimizer):
                for number in range(4 // parts):
                    arm.step(number + part * 4 // parts)
            state = copy.deepcopy(surgery.state_dict())

    whole, halves, forgets = (Arm("gradsurg", kind) for _ in range(3))
    expected = outcome(whole, lambda arm: train(arm, 1))
    assert same(outcome(halves, lambda arm: train(arm, 2)), expected)
    assert not same(outcome(forgets, lambda arm: train(arm, 2, loads=False)), expected)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", GROUPS)
def test_a_group_is_all_sites_at_once(kind: str, reentrant: bool | None) -> None:
    """Each part of a group has a quarter of its norm if the norm of the whole is clipped so."""
    hooked, treated = (Arm(who, kind, make=lambda: Net(reentrant)) for who in ("hand", "gradsurg"))
    hooked.is_on = False
    outcome(hooked, one_step)
    norm = sum(before**2 for before, _ in hooked.norms) ** 0.5
    at = select(kind) if reentrant is None else select(kind, "f*") | select(kind, "[!f]*")
    clip = gs.Intervention(gs.ClipGlobalNorm(norm / 4, eps=0.0), at)

    def by_surgery(arm: Arm) -> None:
        with gs.Surgery(clip).attach(arm.model, arm.optimizer) as live:
            arm.step(0)
        arm.norms += [(row["norm_before"], row["norm_after"]) for row in live.effects.rows()]  # pyright: ignore[reportArgumentType] - numbers

    outcome(treated, by_surgery)
    torch.testing.assert_close(
        sorted(treated.norms), sorted((before, before / 4) for before, _ in hooked.norms)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_effects_are_the_norms_that_hooks_by_hand_see(kind: str) -> None:
    hooked, treated = (Arm(who, kind) for who in ("hand", "gradsurg"))
    for arm in (hooked, treated):
        outcome(arm, one_step)
    torch.testing.assert_close(sorted(treated.norms), sorted(hooked.norms))


# Cases that no hook by hand can show

SITES = {
    "Captured": "{}.weight",
    "Uses": "{}.weight/use[0]",
    "Nodes enter": "{}#0/AddmmBackward[0]",
    "Nodes leave": "{}#0/AddmmBackward[0]",
    "SavedTensors": "{}#0.0",
    "SavedTensors node": "{}#0/AddmmBackward[0].mat1",
    **dict.fromkeys(("Inputs branch", "Inputs total", "Activations input"), "{}#0.input"),
    **dict.fromkeys(("ModuleGradients full_backward",), "{}#0.input"),
    **dict.fromkeys(("EveryModule forward_pre", "EveryModule full_backward"), "{}#0.input"),
}


def site(kind: str, name: str) -> str:
    default = "{}.weight" if kind.startswith(OF_PARAMS) else "{}#0"
    return SITES.get(kind, default).format(name)


def pattern(kind: str, name: str) -> str:
    return f"{name}.weight" if kind.startswith((*OF_PARAMS, "Uses")) else name


@pytest.mark.parametrize("kind", KINDS)
def test_a_transform_that_changes_nothing_leaves_training_bit_identical(kind: str) -> None:
    """One in shadow neither; weights are not even written to, nor global random numbers used."""
    bare = Arm("gradsurg", kind)
    for number in range(3):
        bare.step(number)
    expected, state = outcome(bare, lambda arm: None), torch.get_rng_state()
    versions = [param._version for param in bare.model.parameters()]
    cases: list[tuple[Any, dict[str, Any]]] = [(gs.Identity(), {}), (SIGNS, {"shadow": True})]
    cases += [(SIGNS, {"shadow": True, "effects_every": 0})]
    if kind in GROUPS:
        cases += [(gs.ClipGlobalNorm(1e-3), {"shadow": True})]
    for transform, kwargs in cases:
        arm = Arm("gradsurg", kind, transform=transform)
        with arm.attached(**kwargs):
            for number in range(3):
                arm.step(number)
        assert same(outcome(arm, lambda arm: None), expected)
        assert [param._version for param in arm.model.parameters()] == versions
        assert torch.equal(torch.get_rng_state(), state)


class Mishap(Exception):
    """An exception that no library could know."""


def fail(grad: Tensor) -> Tensor:
    raise Mishap


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("function", "error"), [(fail, Mishap), (lambda grad: grad[:1], TypeError)]
)
def test_an_error_of_a_transform_names_site_and_step(
    kind: str, function: Any, error: Any, first: int
) -> None:
    """At once, or after gradients have passed."""
    number = 0

    def act(grad: Tensor) -> Tensor:
        return function(grad) if number >= first else grad

    def train(arm: Arm) -> None:
        nonlocal number
        with arm.attached():
            for number in range(3):
                arm.step(number)

    arm = Arm("gradsurg", kind, pattern(kind, "first"), transform=Acts(act))
    with pytest.raises(error) as caught:
        outcome(arm, train)
    told = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert f"site '{site(kind, 'first')}" in told
    assert f"step {first}" in told
    assert "acts" in told


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("kind", KINDS)
def test_neither_tensors_of_a_step_nor_the_model_are_kept_alive(kind: str) -> None:
    arm, held = Arm("gradsurg", kind), list[ref[Any]]()
    arm.model.act.register_forward_hook(lambda *given: held.append(ref(given[2])))

    def train(arm: Arm) -> None:
        with arm.attached():
            for is_read in (True, True, False):
                loss = arm.loss(0)
                held.extend([ref(loss), *map(ref, arm.inputs)])
                if is_read:
                    arm.backward(loss)
                    arm.optimizer.step()
                arm.inputs.clear()
                del loss
                gc.collect()
                assert [one() for one in held] == [None] * len(held)

    outcome(arm, train)
    held = [ref(arm.model), *map(ref, arm.model.parameters()), ref(arm.optimizer)]
    del arm
    gc.collect()
    assert [one() for one in held] == [None] * len(held)


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("kind", KINDS)
def test_attaching_again_and_again_piles_up_no_objects(kind: str) -> None:
    arm, counts = Arm("gradsurg", kind), list[int]()
    for _ in range(12):
        outcome(arm, one_step)
        for kept in (arm.norms, arm.calls, arm.inputs):
            kept.clear()
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[-1] - counts[3] < 8


CHANGES_VALUES = ("Activations", "EveryModule forward")


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_after_the_block_is_that_of_pytorch(kind: str) -> None:
    """Unless values were changed in the forward, which was in the block."""
    arm, bare = Arm("gradsurg", kind), Arm("gradsurg", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with arm.attached():
            arm.step(0)
            loss = arm.loss(1)
    bare.model.load_state_dict(arm.model.state_dict())
    other = bare.loss(1)
    for one, its_loss in ((arm, loss), (bare, other)):
        one.model.zero_grad()
        one.backward(its_loss)
    grads, others = ([param.grad for param in one.model.parameters()] for one in (arm, bare))
    assert same(grads, others) != kind.startswith(CHANGES_VALUES)  # pyright: ignore[reportArgumentType] - all have one


@pytest.mark.parametrize("kind", KINDS)
def test_selectors_combine_as_sets_and_their_sites_are_counted(kind: str) -> None:
    def met(at: Selector) -> set[str]:
        arm = Arm("gradsurg", kind)
        surgery = gs.Surgery(gs.Intervention(gs.Identity(), at))
        with surgery.attach(arm.model, arm.optimizer) as live:
            arm.step(0)
        return {entry.site for entry in live.ledger if entry.calls}

    at_first, at_last, at_all = (
        select(kind, pattern(kind, name)) for name in ("first", "last", "*")
    )
    first, last, every = met(at_first), met(at_last), met(at_all)
    assert all(name.startswith(site(kind, "first")) for name in first)
    assert met(at_first | at_last) == first | last < every
    assert met(at_all & ~at_first) == every - first
    assert met(at_all.where(lambda place: place.name.startswith("last"))) == last
    assert met(at_all.first(1)) < every
    assert met(at_all.expect(len(every))) == every
    with pytest.raises(LookupError, match=str(len(every) + 1)):
        met(at_all.expect(len(every) + 1))
    for at, sites in ((at_all, every), (at_first | at_last, first | last)):
        assert {*gs.sites.tree(Net(), batch(0), at).sites} == sites


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_nothing_has_is_refused_with_the_nearest(kind: str) -> None:
    """All or nothing: the hooks of the intervention before it are gone."""
    told = pytest.raises(LookupError, match="did you mean 'first")
    if kind.startswith("EveryModule"):  # a module outside the model may have it
        told = pytest.warns(gs.SurgeryWarning, match="was reached")
    arm, wrong = Arm("gradsurg", kind), select(kind, pattern(kind, "frist"))
    items = [gs.Intervention(gs.Identity(), at) for at in (select(kind), wrong)]
    before = hooks(arm.model, arm.optimizer)
    with told, gs.Surgery(*items).attach(arm.model, arm.optimizer):
        arm.step(0)
    if not kind.startswith("EveryModule"):
        with pytest.raises(LookupError, match="did you mean 'first"):
            gs.sites.tree(arm.model, batch(0), wrong)
    assert hooks(arm.model, arm.optimizer) == before


GIVES_GROUP = ("Parameters backward_end", "Parameters step", "Weights", "Updates")
GIVES_VALUE = ("Parameters", "Buckets", "Updates", "Captured", "Outputs", "Inputs")


@pytest.mark.parametrize("kind", KINDS)
def test_a_transform_that_needs_more_than_a_kind_gives_is_refused(kind: str) -> None:
    at = select(kind)
    for kinds, transform in ((GIVES_VALUE, gs.AGC()), (GIVES_GROUP, gs.ClipGlobalNorm())):
        is_given = kind.startswith(kinds)
        with nullcontext() if is_given else pytest.raises(ValueError, match="needs"):
            gs.Intervention(transform, at)
    stage = "captured" if kind != "Captured" else "step"
    with pytest.raises(ValueError, match=f"cannot have stage '{stage}'"):
        gs.Intervention(gs.Zero(), replace(at, stage=stage))  # pyright: ignore[reportArgumentType] - a dataclass


OF_SUMS = ("Parameters accumulated", "Buckets")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Captured"])
def test_two_threads_at_once_have_the_sites_and_gradients_of_one_after_another(kind: str) -> None:
    def trained(at_once: bool) -> tuple[list[int], list[Tensor]]:
        arm, barrier = Arm("gradsurg", kind), threading.Barrier(2)
        arm.model.drop.p = 0.0  # threads share the random numbers
        if kind.startswith(OF_PARAMS):  # the sum of two threads is written while it is read
            arm.transform = gs.Identity()
        # Two backward passes at once would write to a sum of gradients while it is transformed.
        in_turn = threading.Lock() if kind.startswith(OF_SUMS) else nullcontext()

        def work() -> None:
            x = batch(0)
            arm.inputs.append(x)
            loss = arm.model(x).square().sum()
            with in_turn:
                loss.backward()

        def wait(*_: object) -> None:
            barrier.wait(timeout=10)

        if at_once:
            arm.model.one.register_forward_hook(wait)
        with arm.attached(effects_every=0):
            workers = [threading.Thread(target=work) for _ in range(2)]
            for worker in workers:
                worker.start() if at_once else worker.run()
            for worker in workers if at_once else ():
                worker.join()
            arm.optimizer.step()
        return arm.calls, [x.grad for x in arm.inputs if x.grad is not None]

    (seen, grads), (expected, serial) = trained(True), trained(False)
    assert seen == expected != [0]
    torch.testing.assert_close(grads, serial)


NUMBERED = ("Outputs", "Inputs", "Nodes", "ModuleGradients", "Activations", "SavedTensors")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(NUMBERED)])
def test_call_picks_one_call_of_a_module_and_outside_the_model_it_is_0(kind: str) -> None:
    def seen(run: Callable[[Arm], Any], call: int | None) -> set[str]:
        arm = Arm("gradsurg", kind)
        at = replace(select(kind, "act"), call=call)  # pyright: ignore[reportArgumentType] - a dataclass
        with gs.Surgery(gs.Intervention(SIGNS, at)).attach(arm.model) as live:
            arm.backward(run(arm))
        return {entry.site.partition("/")[0][:5] for entry in live.ledger if entry.calls}

    def of_model(arm: Arm) -> Tensor:
        return arm.loss(0)

    def alone(arm: Arm) -> Tensor:
        return arm.model.act(torch.ones(2, 6, requires_grad=True) * 2).sum()

    calls = [seen(of_model, call) for call in (None, 0, 1)]
    assert calls == [{"act#0", "act#1"}, {"act#0"}, {"act#1"}]
    assert seen(alone, None) == {"act#0"}
    with pytest.raises(RuntimeError, match="'act' is called"):
        seen(alone, 1)
    with pytest.raises(LookupError):
        seen(of_model, 7)
