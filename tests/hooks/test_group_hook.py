"""All gradients of a group together: late results, and parameters that are replaced."""

import gc
from collections.abc import Sequence
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.transforms.base import TransformContext
from tests.nets import attached, backward, gradients, sgd, small, states_of, train, trainee
from tests.sites.points import UserGroup

STEP = gs.Parameters(stage="step")


def test_no_link_of_a_group_runs_in_autocast() -> None:
    model = small()
    optimizer, dtypes = sgd(model), set[torch.dtype]()

    def note(grad: Tensor) -> Tensor:
        dtypes.add((grad.view(-1, 1) @ grad.view(1, -1)).dtype)
        return grad.clone()

    with attached(model, gs.Chain(gs.ClipGlobalNorm(1.0), note), STEP, optimizer):
        backward(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert dtypes == {torch.float32}


def test_a_users_generator_reads_the_gradients_and_not_the_results_of_others() -> None:
    model, optimizer = trainee()
    by_sum = UserGroup(lambda grads, _: (grad / sum(x.norm() for x in grads) for grad in grads))
    with attached(model, by_sum, STEP, optimizer):
        backward(model)
        before = gradients(model)
        optimizer.step()
    total = sum(grad.norm() for grad in before.values())
    torch.testing.assert_close(
        gradients(model), {name: grad / total for name, grad in before.items()}
    )


WRONG = {
    "short": lambda grads, _: [*(grad * 2 for grad in grads[:-1]), grads[-1][:1]],
    "too few": lambda grads, _: [grad * 2 for grad in grads[:-1]],
    "another dtype": lambda grads, _: [grad.double() for grad in grads],
    "none": lambda grads, _: [None for _ in grads],
    "draws": lambda grads, _: (grad * torch.rand(()) for grad in grads),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_of_a_users_group_leaves_all_gradients_as_they_were(wrong: str) -> None:
    model, optimizer = trainee()
    with attached(model, UserGroup(WRONG[wrong]), STEP, optimizer):
        backward(model)
        before = gradients(model)
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            optimizer.step()
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)


def test_an_exception_inside_a_users_group_tells_the_step() -> None:
    model, optimizer = trainee()
    by_zero = UserGroup(lambda grads, of: [grad * (1 // (1 - of[0].step)) for grad in grads])
    with pytest.raises(ZeroDivisionError) as caught, attached(model, by_zero, STEP, optimizer):
        train(model, optimizer, 2)
    assert caught.value.__notes__ == ["while user_group acted on 4 sites, step 1"]


@pytest.mark.parametrize("at", [STEP, gs.Updates()], ids=repr)
def test_a_group_reads_the_parameters_that_the_optimizer_holds_now(at: gs.Parameters) -> None:
    model = small()
    optimizer, seen = sgd(model), list[list[float]]()

    def note(grads: Sequence[Tensor], contexts: Sequence[TransformContext]) -> Sequence[Tensor]:
        values = [c.value.detach() for c in contexts if c.value is not None]
        seen.append([float(value.sum()) for value in values])
        return [grad.clone() for grad in grads]

    with attached(model, UserGroup(note, "value"), at, optimizer):
        train(model, optimizer, 1)
        model.last.weight = nn.Parameter(torch.full((3, 5), 7.0))
        optimizer.param_groups[0]["params"] = [*model.last.parameters()]
        model.first.requires_grad_(False)
        expected = [float(param.detach().sum()) for param in model.last.parameters()]
        train(model, optimizer, 1)
    assert seen[1] == expected


@pytest.mark.usefixtures("frozen_heap")
def test_a_group_gets_the_values_and_does_not_hold_them() -> None:
    model, optimizer = trainee(0.0)
    by_value = UserGroup(
        lambda grads, of: [g * c.value.detach() for g, c in zip(grads, of, strict=True)], "value"
    )
    with attached(model, by_value, STEP, optimizer) as live:
        backward(model)
        grads = gradients(model)
        optimizer.step()
    expected = {name: param.detach() * grads[name] for name, param in model.named_parameters()}
    torch.testing.assert_close(gradients(model), expected)
    held = ref(model.first.weight)
    del model, optimizer
    gc.collect()
    assert held() is None
    assert live.effects.rows()


ABSENT = {
    "zclip": gs.AdaptiveClip(warmup=2),
    "autoclip": gs.AdaptiveClip("quantile", 0.1, max_norm=None),
    "adagc": gs.AdaptiveClip("ratio", 1.05, warmup=2, of="each"),
    "each quantile": gs.AdaptiveClip("quantile", 0.1, max_norm=None, of="each"),
    "skip": gs.SkipUpdate(),
    "wrapped": gs.Scheduled(gs.AdaptiveClip("ratio", warmup=2, of="each"), stop=0.5, steps=1),
}


@pytest.mark.parametrize("name", ABSENT)
def test_a_parameter_may_have_no_gradient_in_a_step(name: str) -> None:
    """With a state of each it acts on a parameter as if the others did not exist."""
    transform = ABSENT[name]
    absent: list[set[int]] = [{3}, set(), {0, 1}, set(), {2}, set()]

    def run(only: int | None) -> list[list[Tensor | None]]:
        params = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
        kept = params if only is None else [params[only]]
        model = nn.ParameterDict({str(index): param for index, param in enumerate(kept)})
        optimizer, results = torch.optim.SGD(kept), list[list[Tensor | None]]()
        with attached(model, transform, STEP, optimizer):
            for step, without in enumerate(absent):
                for index, param in enumerate(params):
                    grad = (torch.arange(3.0) + index) * 0.01 * (1 + step * 7 % 5)
                    param.grad = None if index in without else grad
                optimizer.step()
                results.append([param.grad for param in kept])
        return results

    together = run(None)
    for step, (grads, without) in enumerate(zip(together, absent, strict=True)):
        assert {index for index, grad in enumerate(grads) if grad is None} == without, step
    if "each" in repr(transform):
        alone = [run(index) for index in range(4)]
        for step in range(len(absent)):
            for index in range(4):
                assert_same(together[step][index], alone[index][step][0])


def assert_same(found: Tensor | None, wanted: Tensor | None) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_state_of_each_that_was_saved_together_goes_on() -> None:
    transform = gs.AdaptiveClip("ratio", 1.05, warmup=2, of="each")
    model, optimizer = trainee()
    surgery = gs.Surgery(gs.Intervention(transform, STEP))

    def load(state: dict[str, Tensor]) -> None:
        surgery.load_state_dict(surgery.state_dict() | {"states": {"adaptive_clip/group": state}})

    with surgery.attach(model, optimizer):
        train(model, optimizer, 3)
        parts = [*states_of(surgery).values()]
        assert len(parts) == len([*model.parameters()])
        together = {key: torch.cat([part[key] for part in parts], -1) for key in parts[0]}
        load(together)
        train(model, optimizer, 1, start=3)
        assert [int(state["count"]) for state in states_of(surgery).values()] == [4] * len(parts)
        load({key: value[1:] for key, value in together.items()})
        with pytest.raises(RuntimeError, match="begin with a step in which the same parameters"):
            train(model, optimizer, 1, start=4)
