"""Inputs: the gradient of one branch or of all uses, by place and by keyword."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.module_calls import tensors_in
from gradsurg.transforms.base import Transform
from tests.nets import (
    attached,
    gradients,
    num_hooks,
)
from tests.sites.points import (
    TEN,
    Double,
    Made,
    calls_of,
    grad_of,
    names_of_sites,
    passed,
    point,
    recomputed,
)

PATHS = ("branch", "total")


def _residual(inner: nn.Module) -> Made:
    """d/dh of `h + 2h` is 1 past the module and 2 through it."""

    def forward(self: Made, x: Tensor) -> Tensor:
        h = x * 1
        return h + self.f(h)

    return Made(forward, f=inner)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def _written_later() -> Made:
    def forward(self: Made, x: Tensor) -> Tensor:
        h = x * 1
        h += self.f(h)
        return h

    return Made(forward, f=Double())


BY_VALUE = gs.ScaleBySign(positive=10.0, negative=0.0, of="value")


@pytest.mark.parametrize(
    ("model", "transform", "at", "grad"),
    [
        (_residual(Double()), TEN, gs.Inputs("f"), [1.0 + 10 * 2.0]),
        (_residual(Double()), TEN, gs.Inputs("f", path="total"), [10 * (1.0 + 2.0)]),
        (_written_later(), TEN, gs.Inputs("f"), [1.0 + 20.0]),
        (nn.Sequential(Double(), InPlace()), gs.Clip(1.5), gs.Inputs("1", path="total"), [3.0]),
        # A residual around a reentrant checkpoint is not in the total inside.
        (
            _residual(Made(lambda self, x: recomputed(self.inner, x, True), inner=Double())),
            TEN,
            gs.Inputs("f.inner", path="total"),
            [1.0 + 20.0],
        ),
        (nn.Sequential(Double(), Double()), BY_VALUE, gs.Inputs("1"), [40.0, 0.0]),
        (nn.Sequential(Double(), Double()), BY_VALUE, gs.Inputs("1", path="total"), [40.0, 0.0]),
    ],
)
def test_the_gradient_of_a_branch_or_of_all_uses_is_transformed(
    model: nn.Module, transform: Transform, at: gs.Inputs, grad: list[float]
) -> None:
    x = point(1.0, -1.0) if transform is BY_VALUE else point()
    assert passed(model, transform, at, x) == (grad, {f"{at.pattern}#0.input": 1})


@dataclass
class Pair:
    left: Tensor
    right: list[Tensor]


class Mix(nn.Module):
    """3 a + 5 b + 7 c, whatever holds them."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        weighed = [item * factor for item, factor in zip(given, (3, 5, 7), strict=False)]
        return torch.stack(weighed).sum()


def _mixed(call: Callable[..., Tensor]) -> Made:
    return Made(lambda self, *xs: call(self.mix, *[x * 1 for x in xs]), mix=Mix())


INTEGERS = torch.ones(1, dtype=torch.long)

GIVEN = [
    (lambda mix, a, b, c: mix(a, b, c), ["0", "1", "2"]),
    (lambda mix, a, b, c: mix(a, left=b, right=c), ["0", "left", "right"]),
    (lambda mix, a, b, c: mix((a, b), [c]), ["0.0", "0.1", "1.0"]),
    (lambda mix, a, b, c: mix((a, [b, c])), ["0.0", "0.1.0", "0.1.1"]),
    (lambda mix, a, b, c: mix({"a": a, "b": (b, c)}), ["0.a", "0.b.0", "0.b.1"]),
    (lambda mix, a, b, c: mix(Pair(a, [b, c])), ["0.left", "0.right.0", "0.right.1"]),
    (lambda mix, a, b, c: mix(INTEGERS, a, None, "text", b, c=c), ["1", "4", "c"]),
]
"""How three tensors are given to a module, and where they are then found."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("call", "places"), GIVEN)
def test_every_positional_and_keyword_tensor_is_a_site(
    path: Any, call: Callable[..., Tensor], places: list[str]
) -> None:
    model, given = _mixed(call), [point(), point(), point()]
    with attached(model, gs.Clip(6.0), gs.Inputs("mix", path=path)) as live:
        model(*given).backward()
    assert [grad_of(x) for x in given] == [[3.0], [5.0], [6.0]]
    assert calls_of(live) == {f"mix#0.input.{place}": 1 for place in places}


@pytest.mark.parametrize("path", PATHS)
def test_a_tensor_given_twice_is_one_site_with_both_names(path: Any) -> None:
    model, x = _mixed(lambda mix, a: mix(a, again=a)), point()
    with attached(model, gs.Clip(6.0), gs.Inputs("mix", path=path)) as live:
        model(x).backward()
    assert grad_of(x) == [6.0]  # of 3 + 5
    assert names_of_sites(live) == [["mix#0.input.0", "mix#0.input.again"]]


def test_self_attention_still_sees_that_its_inputs_are_the_same_tensor() -> None:
    torch.manual_seed(0)
    model = Made(
        lambda self, x: self.attention(x, x, x, need_weights=False)[0].sum(),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    )
    x = torch.randn(2, 3, 8)
    plain, hooked = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(plain).backward()
    before = gradients(model)
    model.zero_grad()
    with attached(model, gs.Identity(), gs.Inputs("attention")) as live:
        model(hooked).backward()
    assert names_of_sites(live) == [[f"attention#0.input.{index}" for index in range(3)]]
    assert grad_of(plain) == grad_of(hooked)
    assert all(torch.equal(grad, before[name]) for name, grad in gradients(model).items())


def test_modules_that_take_the_same_tensor_share_a_total_and_have_separate_branches() -> None:
    total = point()
    model = Made(
        lambda self, x: (self.left(x) * 3 + self.right(x)).sum(), left=Double(), right=Double()
    )
    with attached(model, gs.Clip(5.0), gs.Inputs("*", path="total")) as live:
        model(total * 1).backward()
    assert grad_of(total) == [5.0]  # of 6 + 2
    assert names_of_sites(live) == [["left#0.input", "right#0.input"]]
    sites = {"left#0.input": 1, "right#0.input": 1}
    assert passed(model, gs.Clip(5.0), gs.Inputs("*")) == ([5.0 + 2.0], sites)


def test_a_branch_passes_a_container_and_its_first_child_and_a_total_once() -> None:
    results = []
    for path in PATHS:
        model, x = nn.Sequential(nn.Sequential(Double(), Double())), point()
        with attached(model, gs.Scale(10.0), gs.Inputs("re:0|0\\.0", path=path)) as live:
            model(x).sum().backward()
        results.append((grad_of(x), names_of_sites(live)))
    assert results == [
        ([400.0], [["0#0.input"], ["0.0#0.input"]]),
        ([40.0], [["0#0.input", "0.0#0.input"]]),
    ]


def test_a_parameter_as_input_can_be_a_branch_or_a_total() -> None:
    grads = []
    for path in PATHS:
        model = Made(
            lambda self: (self.f(self.prompt) + self.prompt).sum(),
            prompt=nn.Parameter(torch.ones(1)),
            f=Double(),
        )
        with attached(model, gs.Scale(10.0), gs.Inputs("f", path=path)):
            for _ in range(2):
                model.zero_grad()
                model().backward()
        grads.append(gradients(model)["prompt"].item())
        assert num_hooks(model) == 0
    assert grads == [21.0, 30.0]


@pytest.mark.parametrize(
    ("model", "at", "message"),
    [
        ([InPlace()], gs.Inputs("1"), r"'1#0\.input': the module wrote to its input: a hook"),
        ([nn.Flatten(0), InPlace()], gs.Inputs("2", path="total"), "'2#0.*: the module wrote to its input"),
        ([nn.Identity(), InPlace()], gs.Inputs("1"), "'1#0.*: the module returned its input, which was then written"),
        ([nn.Flatten(0), InPlace()], gs.Inputs("1"), "'1#0.*: the module returned its input, which was then written"),
    ],
)
def test_an_input_that_is_written_to_is_refused_as_a_branch(
    model: list[nn.Module], at: gs.Inputs, message: str
) -> None:
    net = nn.Sequential(Double(), *model)
    with pytest.raises(RuntimeError, match=message), attached(net, TEN, at):
        net(torch.ones(2, 2, requires_grad=True))
    assert num_hooks(net) == 0


def test_a_module_that_writes_to_a_container_that_it_took_is_refused_as_a_branch() -> None:
    def append(self: Made, tensors: list[Tensor]) -> None:
        tensors.append(tensors[-1] * 2)

    def forward(self: Made, x: Tensor) -> Tensor:
        tensors = [x * 1]
        self.append(tensors)
        return tensors[-1]

    model = Made(forward, append=Made(append))
    with (
        pytest.raises(RuntimeError, match=r"append#0\.input.*wrote to a container that it took"),
        attached(model, TEN, gs.Inputs("append")),
    ):
        model(point())
    assert passed(model, TEN, gs.Inputs("append", path="total"))[0] == [20.0]


def test_a_module_without_a_floating_input_is_reported() -> None:
    model = nn.Sequential(nn.Embedding(3, 2))
    with (
        pytest.warns(gs.SurgeryWarning, match=r"0#0\.input \(takes no floating tensor\)"),
        attached(model, gs.Zero(), gs.Inputs("0")),
    ):
        model(INTEGERS).sum().backward()


@pytest.mark.parametrize("first", PATHS)
@pytest.mark.parametrize("second", PATHS)
def test_two_interventions_on_one_input_act_in_order(first: Any, second: Any) -> None:
    # 2 clipped to 1, times 10; a branch comes before a total.
    model, x = nn.Sequential(Double()), point()
    clip = gs.Intervention(gs.Clip(1.0), gs.Inputs("0", path=first))
    scale = gs.Intervention(gs.Scale(10.0), gs.Inputs("0", path=second))
    noop = gs.Intervention(gs.Identity(), gs.Inputs("0"))
    with gs.Surgery(noop, clip, scale).attach(model):
        model(x * 1).sum().backward()
    assert grad_of(x) == [1.0 if (first, second) == ("total", "branch") else 10.0]


def test_a_total_includes_all_uses_even_if_a_container_was_given_an_alias() -> None:
    model, x = _residual(nn.Sequential(Double())), point()
    noop = gs.Intervention(gs.Identity(), gs.Inputs("f"))
    clip = gs.Intervention(gs.Clip(0.5), gs.Inputs("f.0", path="total"))
    with gs.Surgery(noop, clip).attach(model):
        model(x).backward()
    assert grad_of(x) == [0.5]


def test_the_output_of_an_identity_is_another_site_than_its_input() -> None:
    model, x = nn.Sequential(Double(), nn.Identity()), point()
    noop = gs.Intervention(gs.Identity(), gs.Inputs("1"))
    scale = gs.Intervention(gs.Scale(10.0), gs.Outputs())
    with gs.Surgery(noop, scale).attach(model):
        model(x).sum().backward()
    assert grad_of(x) == [200.0]


def test_foreign_forward_pre_hooks_run_first() -> None:
    model = nn.Sequential(Double())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    assert passed(model, gs.Clip(1.0), gs.Inputs("0"))[0] == [3.0]


def test_an_alias_keeps_the_strides_of_its_tensor() -> None:
    seen = []
    x = torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    model = nn.Sequential(Made(lambda self, x: seen.append((x.stride(), x.data_ptr())) or x * 2))
    passed(model, gs.Identity(), gs.Inputs("0"), x)
    assert seen == [(x.stride(), x.data_ptr())]
    assert x.view_as(x).stride() != x.stride()


def test_a_call_aborted_by_a_foreign_hook_does_not_end_the_call_around_it() -> None:
    def tries(self: Made, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except OSError:
            return x.mul_(2)

    def breaks(module: nn.Module, args: object) -> None:
        raise OSError("gone")

    model = nn.Sequential(Double(), Made(tries, inner=Double()))
    model[1].inner.register_forward_pre_hook(breaks)
    with (
        pytest.raises(RuntimeError, match=r"'1#0\.input': the module wrote to its input"),
        attached(model, gs.Zero(), gs.Inputs("1*")),
    ):
        model(point())
