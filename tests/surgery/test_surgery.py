"""Attaching, detaching, what is left behind, and the state in between."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import Transform, TransformContext
from tests.nets import (
    attached,
    backward,
    batch,
    grad_of,
    gradients,
    num_hooks,
    sgd,
    small,
    states_of,
    train,
    trainee,
)
from tests.sites.points import Noted


@pytest.mark.parametrize(
    "at", [gs.Parameters(), gs.Outputs("*"), gs.Inputs("*"), gs.Nodes("*")], ids=repr
)
def test_a_shadow_counts_in_the_steps_that_are_measured_alone(at: Selector) -> None:
    (model, optimizer), (other, others) = trainee(), trainee()
    with attached(model, gs.Identity(), at, optimizer, effects_every=3, shadow=True) as live:
        train(model, optimizer, 7)
        rows = live.effects.rows()
    with attached(other, gs.Identity(), at, others, effects_every=3) as live:
        train(other, others, 7)
        wanted = live.effects.rows()
    assert rows == [row | {"seen": row["sampled"], "calls": row["sampled"]} for row in wanted]
    assert len(rows) > 1


def test_a_shadow_that_is_set_between_measured_steps_acts_as_it_is_set() -> None:
    model, optimizer = trainee()
    with attached(model, gs.Identity(), None, optimizer, effects_every=9, shadow=True) as live:
        train(model, optimizer, 2)
        live.set("identity", when=gs.Steps(start=0))  # which is asked at every step
        train(model, optimizer, 2, start=2)
        assert {entry.calls for entry in live.ledger} == {3}


def test_two_surgeries_act_one_after_the_other() -> None:
    plain, model = small(), small()
    backward(plain)
    with attached(model, gs.Scale(2.0)), attached(model, gs.Clip(0.01)):
        backward(model)
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], (grad * 2).clamp(-0.01, 0.01))


def test_a_plain_callable_acts_and_is_warned_about_where_it_matters() -> None:
    model = small()
    with attached(model, torch.zeros_like):
        backward(model)
    assert not any(grad.any() for grad in gradients(model).values())
    optimizer = sgd(model)
    with (
        pytest.warns(gs.SurgeryWarning, match="unless the transform is linear"),
        attached(model, torch.zeros_like, None, optimizer),
    ):
        backward(model)
        backward(model)
        optimizer.step()


def test_labels_are_class_names_in_snake_case_and_never_the_same_twice() -> None:
    chain = gs.Chain(gs.Clip(), gs.ClipNorm(), gs.Clip())
    surgery = gs.Surgery(gs.Intervention(chain), gs.Intervention(gs.Clip()))
    assert surgery.labels == (("clip", "clip_norm", "clip_2"), ("clip_3",))
    given = gs.Intervention(gs.Chain(*[gs.Clip()] * 3), names=("clip", "clip_2", "clip"))
    assert gs.Surgery(given).labels == (("clip", "clip_2", "clip_3"),)


def test_plan_says_what_would_be_hooked_and_hooks_nothing() -> None:
    model = small()
    surgery = gs.Surgery(
        gs.Intervention(gs.Chain(gs.Clip(), gs.Scale()), at=gs.Parameters("*.weight")),
        gs.Intervention(gs.ClipGlobalNorm(), when=gs.Steps(stop=3)),
    )
    text = surgery.plan(model)
    links = "clip: Clip(value=0.01) -> scale: Scale(factor=0.1)"
    assert f"{links} at Parameters(pattern='*.weight'" in text
    assert "stage backward" in text
    assert "stage step, when Steps(start=0, stop=3, every=1)" in text
    assert text.count("first.weight") == 2
    assert text.count("first.bias") == 1
    assert num_hooks(model) == 0
    assert gs.Surgery().plan(model) == "no intervention"


def test_with_an_example_the_plan_is_the_tree_of_each_intervention() -> None:
    model = small()
    relu = gs.Outputs("act")
    surgery = gs.Surgery(
        gs.Intervention(gs.GrokfastEMA(), at=relu), gs.Intervention(gs.Clip(), at=gs.Parameters())
    )
    x = batch()[0]
    first, second = surgery.plan(model, x).split("\n\nclip: Clip(value=0.01) at ")
    # A mean of as many floats as the output has entries, and whether it has begun.
    plan = "stage backward, when Always(), 1 site, 161 bytes of state with this input"
    head = f"grokfast_ema: {gs.GrokfastEMA()!r} at {relu!r}"
    assert first == f"{head}\n{gs.sites.tree(model, x, relu)}\n{plan}"
    assert second.endswith("4 sites selected (*)\nstage backward, when Always(), 4 sites")
    assert num_hooks(model) == 0
    assert gs.Surgery().plan(model, x) == f"{gs.sites.tree(model, x)}\nno intervention"


def test_a_plan_says_how_much_state_there_will_be_as_far_as_shapes_are_known() -> None:
    model, x = small(), batch()[0]

    def planned(at: Selector, example: Tensor | None = None) -> str:
        return gs.Surgery(gs.Intervention(gs.GrokfastEMA(), at=at)).plan(model, example)

    assert ", 74 bytes of state\n" in planned(gs.Parameters("last.*")) + "\n"
    assert ", 74 bytes of state" in planned(gs.Parameters("last.*"), x)
    assert "when Always(), state of unknown size at 1 site" in planned(gs.Outputs("act"))
    surgery = gs.Surgery(gs.Intervention(gs.GrokfastEMA(), gs.Parameters("last.*")))
    with surgery.attach(model):
        backward(model)
    held = [tensor for state in states_of(surgery).values() for tensor in state.values()]
    assert sum(tensor.nbytes for tensor in held) == 74


# Randomness


def test_random_numbers_depend_on_seed_key_step_and_call_but_not_on_the_global_generator() -> None:
    def seed(key: str = "noise/w", step: int = 0, call: int = 0, **fields: int) -> int:
        context = TransformContext(key, step, call=call, **fields)
        return context.generator(torch.device("cpu")).initial_seed()

    first = seed()
    others = [seed("noise_2/w"), seed(step=1), seed(call=1), seed(seed=1), seed(rank=1)]
    torch.manual_seed(99)
    assert seed() == first
    assert len({first, *others}) == 6


def test_the_global_random_generator_is_not_used() -> None:
    model, optimizer = trainee()
    before = torch.get_rng_state()
    with attached(model, gs.AddNoise(sigma=1.0), None, optimizer, gs.Probability(p=1.0)):
        train(model, optimizer, 2)
    assert torch.equal(torch.get_rng_state(), before)


# Raw tensors and nodes


@pytest.mark.parametrize("of_node", [False, True], ids=["tensor", "node"])
def test_hook_acts_on_one_place_until_its_handle_or_block_takes_it_off(of_node: bool) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x * 3
    handle = gs.hook(y.grad_fn if of_node else y, gs.Clip(0.5))
    with handle if of_node else nullcontext():
        (y * 10).sum().backward(retain_graph=True)
    assert grad_of(x).tolist() == [1.5, 1.5]
    if not of_node:
        handle.remove()
    (y * 10).sum().backward()
    assert grad_of(x).tolist() == [31.5, 31.5]


def test_hook_gives_the_transform_the_tensor() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    gs.hook(x, gs.ScaleBySign(positive=5.0, negative=0.0, of="value"))
    (x * 10).sum().backward()
    assert grad_of(x).tolist() == [50.0, 0.0]


@pytest.mark.parametrize("of_node", [False, True], ids=["tensor", "node"])
def test_a_hook_whose_block_ends_before_a_gradient_has_passed_says_so(of_node: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    place = y.grad_fn if of_node else y
    with (
        pytest.warns(gs.SurgeryWarning, match="clip: it was hooked, and no gradient passed before"),
        gs.hook(place, gs.Clip(0.5)),
    ):
        pass
    y.sum().backward()
    assert grad_of(x).tolist() == [2, 2, 2]  # as it was said
    with pytest.raises(KeyError), gs.hook(place, gs.Clip(0.5)):  # which says it by itself
        raise KeyError
    gs.hook(place, gs.Clip(0.5)).remove()


# Loss scaling


def _scaled_step(model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    x, y = batch()
    loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


SIZED = [
    (gs.Clip(0.01), gs.Always(), "Clip"),
    (gs.GradientReversal(), gs.Threshold(above=1.0), "Threshold"),
]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(("transform", "when", "name"), SIZED, ids=["transform", "trigger"])
def test_a_scaler_that_was_not_told_is_noticed_at_its_first_step(
    transform: Transform, when: gs.Trigger, name: str, fused: bool
) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    surgery = gs.Surgery(gs.Intervention(transform, when=when))
    with warnings.catch_warnings(record=True) as caught, surgery.attach(model, optimizer) as live:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            _scaled_step(model, optimizer, scaler)
        with pytest.raises(ValueError, match="loss scale"):
            live.add(gs.Intervention(gs.Clip(1.0)))
    (text,) = [str(warning.message) for warning in caught]
    assert "attach was not given the GradScaler: attach(.., scaler=scaler)" in text
    assert f"{name}(" in text


@pytest.mark.parametrize(
    ("transform", "stage", "enabled"),
    [(gs.Clip(), None, False), (gs.GradientReversal(), None, True), (gs.Clip(), "step", True)],
)
def test_where_a_scaler_changes_nothing_it_is_not_told_of(transform, stage, enabled) -> None:
    model, optimizer = trainee()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    with attached(model, transform, gs.Parameters(stage=stage), optimizer) as live:
        _scaled_step(model, optimizer, scaler)
    assert min(entry.calls for entry in live.ledger) > 0


def test_a_fused_optimizer_that_unscales_by_itself_is_refused_at_stage_step() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with (
        pytest.raises(RuntimeError, match="unscale_"),
        attached(model, gs.Clip(0.01), gs.Parameters(stage="step"), optimizer),
    ):
        _scaled_step(model, optimizer, scaler)


# Context and names in the live surgery


def test_a_transform_is_told_its_site_the_step_and_the_call() -> None:
    noted = Noted()
    model, optimizer = trainee()
    at = gs.Parameters("last.bias", stage="backward")
    with attached(model, noted, at, optimizer) as live:
        backward(model)
        with pytest.warns(gs.SurgeryWarning, match="had 2 gradients in one optimizer step"):
            backward(model)
            optimizer.step()
        train(model, optimizer, 1)
    (site,) = {row["site"] for row in live.effects.rows()}
    assert site == "last.bias"
    assert noted.sites == [site] * 3
    assert [*zip(noted.steps, noted.calls, strict=True)] == [(0, 0), (0, 1), (1, 0)]


def test_the_random_numbers_of_a_site_depend_on_the_label_and_the_link_of_a_chain() -> None:
    """By the keys `noise/last.bias` and `noise/last.bias/1`, so that runs can be repeated."""
    link, model = gs.AddNoise(eta=0.1), small()
    inner = gs.Scheduled(gs.Chain(gs.Identity(), link), start=1.0)  # the surgery sees no chain
    backward(model)
    plain = gradients(model)["last.bias"]
    for transform, key in ((link, "noise/last.bias"), (inner, "noise/last.bias/1")):
        model.zero_grad()
        at = gs.Parameters("last.bias", stage="backward")
        with gs.Surgery(gs.Intervention(transform, at, names=["noise"]), seed=3).attach(model):
            backward(model)
        found = gradients(model)["last.bias"]
        assert torch.equal(found, link.apply(plain, TransformContext(key, seed=3)))


def test_two_places_hooked_one_by_one_draw_different_noise() -> None:
    first, second = (torch.zeros(8, requires_grad=True) for _ in range(2))
    for place in (first, second):
        gs.hook(place, gs.AddNoise())
        place.sum().backward()
    assert not torch.equal(first.grad, second.grad)


class Doubling:
    def __call__(self, grad: Tensor) -> Tensor:
        return grad * 2


def test_the_state_of_a_callable_object_is_known_to_an_equal_surgery() -> None:
    first, second = (gs.Surgery(gs.Intervention(Doubling())) for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
