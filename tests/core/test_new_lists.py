"""Kinds with several places at once, of the new core: the optimizers, their rounds, processes.

Each situation is run by the present core and by the new one; some also by hand.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam, Optimizer

import gradsurg as gs
from gradsurg.core.intervention import Intervention
from gradsurg.sites.updates import MatchedUpdates
from tests.core.test_new_shape import New, query_of
from tests.forks import Ranks, in_ranks
from tests.nets import backward, num_hooks, sgd, small, weights

pytestmark = pytest.mark.filterwarnings("ignore::gradsurg.effects.ledger.SurgeryWarning")

STEP = gs.Parameters(stage="step")
GROUP = gs.ClipGlobalNorm(0.01)
AT_STEPS = [STEP, gs.Updates(), MatchedUpdates(), gs.Weights()]


class Lists(New):
    """The handle of the new core, with what is done to optimizers."""

    def bind(self, optimizer: Optimizer) -> None:
        self.attachment.bind(optimizer)

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        self.attachment.steps.run_before(optimizer, None)

    def end_warnings(self) -> list[str]:
        for each in self.attachment.operations:
            assert len(each.end_checks) <= 1, "they are forgotten when a kind is watched anew"
            texts = [check() for check in each.end_checks]
            assert not any(texts), "it is noted for those interventions that it is about"
        return [note for each in self.attachment.operations for note in each.notes]

    def close(self) -> None:
        self.attachment.close()


def start_new(model: nn.Module, optimizer: Any, *items: Intervention) -> Lists:
    return Lists(model, optimizer, *items)


def start_present(model: nn.Module, optimizer: Any, *items: Intervention) -> Any:
    return gs.Surgery(*items).start(model, optimizer)


STARTS = {"present": start_present, "new": start_new}
Start = Callable[..., Any]  # Any: the handle of either core


def outcome(live: Any, model: nn.Module) -> list[object]:
    """Weights, counts by site, the rows of effects; those of a loop without a surgery differ."""
    seen = [entry for entry in live.ledger if entry.all_calls]
    counts = sorted((e.intervention, e.site, e.all_calls, e.all_fired) for e in seen)
    found = [weights(model), counts, sorted(map(str, live.effects.rows()))]
    live.close()
    return found


def assert_same(run: Callable[[Start], list[object]]) -> None:
    expected, found = run(start_present), run(start_new)
    assert expected[1], "nothing acts"
    for old, new in zip(expected[0], found[0], strict=True):  # pyright: ignore[reportArgumentType]
        assert torch.equal(old, new)
    assert found[1:] == expected[1:]


# By hand.


def clamp(tensor: Tensor) -> Tensor:
    return tensor.clamp(-0.05, 0.05)


def _step_by_hand(kind: str, model: nn.Module, optimizer: Optimizer) -> None:
    params = [*model.parameters()]
    with torch.no_grad():
        if kind == "forward":
            for param in params:
                param.copy_(clamp(param))
        optimizer.zero_grad()
    for step in (0, 1):
        backward(model, step)
        for param in params if kind in ("accumulated", "backward_end") else ():
            param.grad = None if param.grad is None else clamp(param.grad)
    for param in params if kind == "step" else ():
        param.grad = None if param.grad is None else clamp(param.grad)
    before = weights(model)
    optimizer.step()
    with torch.no_grad():
        for param, old in zip(params, before, strict=True):
            if kind == "weights":
                param.copy_(clamp(param))
            if kind == "updates":
                update = param - old
                param.copy_(torch.where(clamp(update) == update, param, old + clamp(update)))


BY_HAND = {
    "accumulated": gs.Parameters(stage="accumulated"),
    "backward_end": gs.Parameters(stage="backward_end"),
    "step": STEP,
    "weights": gs.Weights(),
    "updates": gs.Updates(),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_weights_are_those_of_a_loop_by_hand(kind: str) -> None:
    hand, model = small(), small()
    theirs, ours = SGD(hand.parameters(), 0.5, 0.9), SGD(model.parameters(), 0.5, 0.9)
    live = start_new(model, ours, gs.Intervention(clamp, at=BY_HAND[kind]))
    for _ in range(3):
        _step_by_hand(kind, hand, theirs)
        _step_by_hand("", model, ours)
        assert not live.attachment.steps.copies
    live.close()
    assert all(map(torch.equal, weights(model), weights(hand)))
    plain = small()
    for optimizer in [SGD(plain.parameters(), 0.5, 0.9)]:
        for _ in range(3):
            _step_by_hand("", plain, optimizer)
    assert not any(map(torch.equal, weights(model), weights(plain)))


# Optimizers.


def _two(model: nn.Module) -> list[Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    return [SGD(matrices, lr=0.1, momentum=0.9), Adam(others, lr=0.1)]


def _mixed() -> list[Intervention]:
    """Interventions of all kinds at steps, one between the others."""
    ats = [gs.Weights("last.*"), STEP, gs.Updates(), STEP, gs.Updates("*.bias"), STEP]
    transforms = [gs.Clip(0.3), GROUP, gs.Momentum(0.5), gs.AddNoise(0.1), gs.Sign(), gs.Scale(2.0)]
    items = [gs.Intervention(each, at=at) for each, at in zip(transforms, ats, strict=True)]
    return [*items, gs.Intervention(gs.Scale(0.9), at=gs.Weights("first.*"))]


@pytest.mark.parametrize("several", [False, True])
def test_interventions_of_several_kinds_act_in_the_order_of_the_surgery(several: bool) -> None:
    def run(start: Start) -> list[object]:
        model = small()
        optimizers = _two(model) if several else [sgd(model)]
        live = start(model, optimizers, *_mixed())
        for step in range(4):
            backward(model, step)
            for optimizer in optimizers[step % 2 if several else 0 :]:
                optimizer.step()
            model.zero_grad()
        return outcome(live, model)

    assert_same(run)


@pytest.mark.parametrize("moment", ["in a round", "between rounds", "in a step", "after a step"])
def test_changes_of_other_interventions_leave_a_round_and_a_step_as_they_are(moment: str) -> None:
    def run(start: Start) -> list[object]:
        model = small()
        optimizers = _two(model)
        lives: list[Any] = []

        def change(when: str, step: int) -> None:
            if when != moment:
                return
            live = lives[0]
            match step:
                case 0:
                    live.add(gs.Intervention(gs.Identity(), at=gs.Outputs("act"), names=("late",)))
                case 1:
                    live.set("scale", factor=0.7)
                case 2:
                    live.remove("late")

        # Before those of the surgery, which so finds other interventions at the end of the step.
        optimizers[0].register_step_pre_hook(lambda *_: change("in a step", len(done)))
        optimizers[0].register_step_post_hook(lambda *_: change("after a step", len(done)))
        done: list[int] = []
        items = [gs.Intervention(GROUP), gs.Intervention(gs.Momentum(0.5), at=gs.Updates())]
        items.append(gs.Intervention(gs.Scale(0.9), at=gs.Weights("*.weight")))
        lives.append(start(model, optimizers, *items))
        for step in range(4):
            backward(model, step)
            optimizers[0].step()
            change("in a round", step)
            optimizers[1].step()
            change("between rounds", step)
            model.zero_grad()
            done.append(step)
        return outcome(lives[0], model)

    assert_same(run)


def test_stage_step_waits_for_bind_and_another_optimizer_may_come() -> None:
    def run(start: Start) -> list[object]:
        model = small()
        live = start(model, None, *_mixed(), gs.Intervention(gs.Zero(), at=STEP.expect(4)))
        first, second = sgd(model), Adam(model.parameters(), 0.01)
        for step, optimizer in enumerate([first, first, second, second]):
            if step in (1, 2):
                live.bind(optimizer)
            model.zero_grad()
            backward(model, step)
            optimizer.step()
        found = outcome(live, model)
        assert num_hooks(model, first, second) == 0
        return found

    assert_same(run)


@pytest.mark.parametrize("at", AT_STEPS, ids=repr)
def test_parameters_that_are_thawed_added_or_replaced_join(at: Any) -> None:
    def run(start: Start) -> list[object]:
        model = small()
        model.first.requires_grad_(False)
        optimizer = SGD([*model.last.parameters()], lr=0.1)
        item = gs.Intervention(gs.Momentum(0.5), at=type(at)("*"))
        if isinstance(at, gs.Parameters):
            item = gs.Intervention(gs.Momentum(0.5), at=at)
        live = start(model, optimizer, item)
        for step in range(4):
            match step:
                case 1:
                    model.first.requires_grad_(True)
                    optimizer.add_param_group({"params": [*model.first.parameters()]})
                case 2:
                    model.append(nn.Linear(3, 3))
                    nn.init.eye_(model[3].weight)
                    optimizer.add_param_group({"params": [*model[3].parameters()]})
                    live.add(gs.Intervention(gs.Identity(), at=gs.Outputs("act")))
                case 3:
                    model[3] = nn.Linear(3, 3)
                    nn.init.eye_(model[3].weight)
                    nn.init.zeros_(model[3].bias)
            model.zero_grad()
            backward(model, step)
            optimizer.step()
        if start is start_new:
            told = "no optimizer of the surgery holds 3.weight, 3.bias"
            assert [told in text for text in live.end_warnings()] == [True]
        return outcome(live, model)

    assert_same(run)


@pytest.mark.parametrize("how", ["before_step", "closure", "LBFGS", "scaler"])
def test_ways_to_step(how: str) -> None:
    def run(start: Start) -> list[object]:
        model = small()
        is_lbfgs = how == "LBFGS"
        optimizer = LBFGS(model.parameters(), max_iter=3) if is_lbfgs else sgd(model)
        items = [item for item in _mixed() if not (is_lbfgs and isinstance(item.at, gs.Updates))]
        live = start(model, optimizer, *items)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how == "scaler")

        def closure(step: int) -> Tensor:
            model.zero_grad()
            loss = model(torch.ones(2, 6) * (1 + step)).square().sum()
            scaler.scale(loss * (float("inf") if how == "scaler" and step == 1 else 1)).backward()
            return loss

        for step in range(3):
            if how in ("closure", "LBFGS"):
                optimizer.step(lambda step=step: closure(step))  # pyright: ignore
                continue
            closure(step)
            if how == "before_step":
                live.before_step()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return outcome(live, model)

    assert_same(run)


def _twice(model: nn.Module) -> list[Optimizer]:
    return [sgd(model), sgd(model)]


REFUSED: dict[str, tuple[Any, Any, Callable[[nn.Module], Any], str]] = {
    "in no optimizer": (GROUP, STEP, lambda model: sgd(model.first), "does not have last.weight"),
    "in two": (GROUP, STEP, _twice, "two optimizers have first.weight"),
    "a group of weights": (GROUP, gs.Weights(), _two, "two optimizers share it"),
    "a group of updates": (GROUP, gs.Updates(), _two, "two optimizers share it"),
    "a matched group": (GROUP, MatchedUpdates(), _two, "two optimizers share it"),
    "LBFGS": (gs.Clip(), gs.Updates(), lambda model: LBFGS(model.parameters()), "LBFGS"),
    "LBFGS, skip": (gs.SkipUpdate(), STEP, lambda model: LBFGS(model.parameters()), "LBFGS"),
    "count": (gs.Clip(), STEP.expect(3), sgd, "3 sites were expected, found 4"),
    "typo": (gs.Clip(), gs.Weights("fist.*"), sgd, "first"),
    "frozen": (gs.Clip(), gs.Weights(stage="forward"), sgd, "is frozen: first.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_those_of_the_present_core(name: str) -> None:
    transform, at, make, text = REFUSED[name]
    told: list[tuple[type, str]] = []
    for start in STARTS.values():
        model = small()
        model.requires_grad_(name != "frozen")
        optimizer = make(model)
        with pytest.raises((ValueError, LookupError), match=text) as caught:
            start(model, optimizer, gs.Intervention(transform, at=at))
        told.append((type(caught.value), str(caught.value)))
        several = optimizer if isinstance(optimizer, list) else [optimizer]
        assert num_hooks(model, *several) == 0
    assert told[0] == told[1]


def test_a_parameter_that_no_optimizer_holds_is_refused_by_bind_and_not_by_another_add() -> None:
    model = small()
    live = start_new(model, None, gs.Intervention(GROUP))
    with pytest.raises(ValueError, match="does not have last.weight, last.bias"):
        live.bind(sgd(model.first))
    optimizer = sgd(model)
    live.bind(optimizer)
    model.append(nn.Linear(3, 3))
    model.first.bias.requires_grad_(False)  # so that the parameters are looked for again
    optimizer.step()
    live.add(gs.Intervention(gs.Clip(), at=gs.Parameters("first.*", stage="step")))
    with pytest.raises(ValueError, match="does not have 3.weight"):
        live.add(gs.Intervention(gs.Clip(), at=gs.Parameters("3.*", stage="step")))
    live.close()


def test_a_group_with_a_state_keeps_its_members_also_after_an_add() -> None:
    for start in STARTS.values():
        model = small()
        optimizer = sgd(model)
        live = start(model, optimizer, gs.Intervention(Counted()))
        backward(model)
        optimizer.step()
        live.add(gs.Intervention(gs.Identity(), at=gs.Outputs("act")))
        model.zero_grad()
        model.first.weight.square().sum().backward()
        with pytest.raises(RuntimeError, match=r"must\s+stay the same: at first first.weight, "):
            optimizer.step()
        live.close()


class Counted(gs.ClipGlobalNorm):
    """Keeps a number, whose group must stay the same."""

    def init_group(self, grads: Any) -> dict[str, Tensor]:
        return {"number": torch.zeros(())}

    def update_group(self, grads: Any, state: Any, contexts: Any) -> Any:
        return list(grads), {"number": state["number"] + 1}


@pytest.mark.parametrize("at", [*AT_STEPS, *BY_HAND.values()], ids=repr)
def test_a_transform_may_close_its_surgery(at: Any) -> None:
    model = small()
    optimizer = sgd(model)
    lives: list[Lists] = []

    def act(grad: Tensor) -> Tensor:
        lives[0].close()
        return grad * 2

    lives.append(start_new(model, optimizer, gs.Intervention(act, at=at)))
    backward(model)
    optimizer.step()
    assert not lives[0].attachment.is_open
    assert num_hooks(model, optimizer) == 0


def test_the_query_of_a_selector_has_its_repr_and_finds_its_parameters() -> None:
    model = small()
    for at in (*AT_STEPS, *BY_HAND.values(), gs.Buckets("first.*", reduce="fp16")):
        query = query_of(at)
        assert repr(query) == repr(at)
        assert query.find(model) == at.find(model)
        assert query.provides == at.provides
        assert query.changed_tensors == at.changed_tensors


# Several processes.


def _trained(start: Start, ranks: Ranks, name: str, *items: Intervention) -> list[object]:
    model: nn.Module = small()
    wrapped: Any = model
    if name.startswith("sharded"):
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks.count,)))
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = sgd(model)
    live = start(wrapped if start is start_present else model, optimizer, *items)
    for step in range(4):
        optimizer.zero_grad()
        with wrapped.no_sync() if name == "no_sync" and step % 2 else nullcontext():
            loss = wrapped(torch.full((2, 6), 1.0 + ranks.rank + step)).square().sum()
        if name == "add" and items and step == 2:  # to a graph that is there
            live.add(gs.Intervention(gs.Identity(), at=gs.Outputs("act")))
        loss.backward()
        optimizer.step()
    seen = [entry for entry in live.ledger if entry.all_calls]
    counts = sorted((e.intervention, e.site, e.all_calls, e.sent) for e in seen)
    rows = sorted(map(str, live.effects.rows()))
    live.close()
    params = [param.detach() for param in model.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in params]
    return [whole, counts, rows]


def _in_processes(ranks: Ranks, folder: Path) -> dict[str, list[bool]]:
    clip, noise = gs.Clip(0.01), gs.AddNoise(0.1)
    end = gs.Parameters(stage="backward_end")
    cases: dict[str, list[Intervention]] = {
        "backward_end": [gs.Intervention(GROUP, at=end), gs.Intervention(noise, at=end)],
        "add": [gs.Intervention(GROUP, at=end)],
        "no_sync": [gs.Intervention(gs.Momentum(), at=end)],
        "buckets": [
            gs.Intervention(gs.ErrorFeedback(gs.Mask(0.3)), at=gs.Buckets()),
            gs.Intervention(clip, at=gs.Buckets(stage="reduced")),
        ],
        "add powerSGD": [gs.Intervention(clip, at=gs.Buckets(reduce="powerSGD"))],
        "sharded step": [gs.Intervention(clip, at=STEP), gs.Intervention(GROUP, at=STEP)],
        "sharded gathered": [
            gs.Intervention(gs.Mask(0.3), at=STEP),
            gs.Intervention(gs.AddDecayed(0.1), at=STEP),
        ],
        "sharded accumulated": [
            gs.Intervention(each, at=gs.Parameters(stage="accumulated"))
            for each in (gs.Momentum(), clip)
        ],
    }
    found: dict[str, list[bool]] = {}
    for name, items in cases.items():
        key = name.replace(" powerSGD", "")
        expected = _trained(start_present, ranks, key, *items)
        actual = _trained(start_new, ranks, key, *items)
        plain = _trained(start_present, ranks, key)
        same = all(map(torch.equal, actual[0], expected[0]))  # pyright: ignore
        acts = not any(map(torch.equal, expected[0], plain[0]))  # pyright: ignore
        found[name] = [same, acts, actual[1] == expected[1], actual[2] == expected[2]]
    return found


def test_in_several_processes_it_acts_as_the_present_core() -> None:
    found = in_ranks(2, _in_processes)
    assert found == dict.fromkeys(found, [True] * 4)
