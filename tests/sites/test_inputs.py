"""Inputs: the gradient of one branch or of all uses, by place and by keyword."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.nets import (
    attached,
    gradients,
    num_hooks,
)
from tests.sites.points import Double, Made, calls_of, grad_of, point, recomputed

PATHS = ("branch", "total")


class Residual(nn.Module):
    """d/dh of `h + 2h` is 1 past the module and 2 through it."""

    def __init__(self) -> None:
        super().__init__()
        self.f = Double()

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1
        return (h + self.f(h)).sum()


def test_a_branch_leaves_the_gradient_past_the_module_alone_and_a_total_does_not() -> None:
    grads = []
    for path in PATHS:
        model, x = Residual(), point()
        with attached(model, gs.Scale(10.0), gs.Inputs("f", path=path)) as live:
            model(x).backward()
        grads.append(grad_of(x))
        assert calls_of(live) == {"f#0.input": 1}
    assert grads == [[1.0 + 10 * 2.0], [10 * (1.0 + 2.0)]]


@dataclass
class Pair:
    left: Tensor
    right: list[Tensor]


class Mix(nn.Module):
    """3 a + 5 b + 7 c, whatever holds them."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given: list[Tensor] = []

        def walk(value: Any) -> None:
            if isinstance(value, Tensor):
                given.extend([value] if value.is_floating_point() else [])
            elif isinstance(value, Pair):
                walk([value.left, value.right])
            elif isinstance(value, dict):
                walk(list(value.values()))
            elif isinstance(value, list | tuple):
                for item in value:
                    walk(item)

        walk(args)
        walk(kwargs)
        weighed = [item * factor for item, factor in zip(given, (3, 5, 7), strict=False)]
        return torch.stack(weighed).sum()


class Mixed(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.mix = Mix()
        self.call = call

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.call(self.mix, *[tensor * 1 for tensor in tensors])


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
    model, given = Mixed(call), [point(), point(), point()]
    with attached(model, gs.Clip(6.0), gs.Inputs("mix", path=path)) as live:
        model(*given).backward()
    assert [grad_of(x) for x in given] == [[3.0], [5.0], [6.0]]
    assert calls_of(live) == {f"mix#0.input.{place}": 1 for place in places}


@pytest.mark.parametrize("path", PATHS)
def test_a_tensor_given_twice_is_one_site_with_both_names(path: Any) -> None:
    model, x = Mixed(lambda mix, a: mix(a, again=a)), point()
    with attached(model, gs.Clip(6.0), gs.Inputs("mix", path=path)) as live:
        model(x).backward()
    assert grad_of(x) == [6.0]  # of 3 + 5
    (entry,) = live.ledger
    assert (entry.site, entry.aliases) == ("mix#0.input.0", ["mix#0.input.again"])


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
    assert [entry.aliases for entry in live.ledger] == [
        ["attention#0.input.1", "attention#0.input.2"]
    ]
    assert plain.grad is not None
    assert hooked.grad is not None
    assert torch.equal(plain.grad, hooked.grad)
    assert all(torch.equal(grad, before[name]) for name, grad in gradients(model).items())


def test_modules_that_take_the_same_tensor_share_a_total_and_have_separate_branches() -> None:
    total, branch = point(), point()
    model = Made(
        lambda self, x: (self.left(x) * 3 + self.right(x)).sum(), left=Double(), right=Double()
    )
    with attached(model, gs.Clip(5.0), gs.Inputs("*", path="total")) as live:
        model(total * 1).backward()
    assert grad_of(total) == [5.0]  # of 6 + 2
    assert [(entry.site, entry.aliases) for entry in live.ledger] == [
        ("left#0.input", ["right#0.input"])
    ]
    with attached(model, gs.Clip(5.0), gs.Inputs("*")) as live:
        model(branch * 1).backward()
    assert grad_of(branch) == [5.0 + 2.0]
    assert calls_of(live) == {"left#0.input": 1, "right#0.input": 1}


def test_a_branch_passes_a_container_and_its_first_child_and_a_total_once() -> None:
    results = []
    for path in PATHS:
        model, x = nn.Sequential(nn.Sequential(Double(), Double())), point()
        with attached(model, gs.Scale(10.0), gs.Inputs("re:0|0\\.0", path=path)) as live:
            model(x).sum().backward()
        results.append((grad_of(x), [(entry.site, entry.aliases) for entry in live.ledger]))
    assert results == [
        ([400.0], [("0#0.input", []), ("0.0#0.input", [])]),
        ([40.0], [("0#0.input", ["0.0#0.input"])]),
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


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_a_module_that_writes_to_its_input_is_refused_as_a_branch() -> None:
    model = nn.Sequential(Double(), InPlace())
    with (
        pytest.raises(RuntimeError) as caught,
        attached(model, gs.Scale(10.0), gs.Inputs("1")),
    ):
        model(point())
    assert str(caught.value) == (
        "Inputs: site '1#0.input': the module wrote to its input in place, and the gradient of "
        "this branch cannot be told from that of the tensor itself. Use path='total', or Outputs "
        "of the module before."
    )
    assert num_hooks(model) == 0


def test_a_total_is_right_where_a_module_writes_to_its_input() -> None:
    model, x = nn.Sequential(Double(), InPlace()), point()
    with attached(model, gs.Clip(1.5), gs.Inputs("1", path="total")):
        model(x).sum().backward()
    assert grad_of(x) == [1.5 * 2]


def test_a_total_of_a_view_that_is_written_to_is_refused() -> None:
    model = nn.Sequential(Double(), nn.Flatten(0), InPlace())
    with (
        pytest.raises(RuntimeError, match=r"'2#0\.input'.*drops the hooks of a view"),
        attached(model, gs.Scale(10.0), gs.Inputs("2", path="total")),
    ):
        model(torch.ones(2, 2, requires_grad=True))


@pytest.mark.parametrize("handing", [nn.Identity(), nn.Flatten(0)])
def test_an_input_that_is_returned_and_then_written_to_is_refused(handing: nn.Module) -> None:
    model = nn.Sequential(Double(), handing, InPlace())
    with (
        pytest.raises(RuntimeError, match=r"'1#0\.input': the module handed on its input, which"),
        attached(model, gs.Scale(10.0), gs.Inputs("1")),
    ):
        model(torch.ones(2, 2, requires_grad=True))


def test_an_input_may_be_written_to_after_the_module_has_read_it() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = Double()

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1
            y = self.f(h)
            h += y
            return h.sum()

    model, x = Later(), point()
    with attached(model, gs.Scale(10.0), gs.Inputs("f")):
        model(x).backward()
    assert grad_of(x) == [1.0 + 20.0]


def test_a_module_that_writes_to_a_container_that_it_took_is_refused_as_a_branch() -> None:
    class Appends(nn.Module):
        def forward(self, tensors: list[Tensor]) -> Tensor:
            tensors.append(tensors[-1] * 2)
            return tensors[-1]

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.append = Appends()

        def forward(self, x: Tensor) -> Tensor:
            tensors = [x * 1]
            self.append(tensors)
            return tensors[-1].sum()

    x = point()
    model = Keeps()
    with (
        pytest.raises(RuntimeError, match=r"append#0\.input.*wrote to a container that it took"),
        attached(model, gs.Scale(10.0), gs.Inputs("append")),
    ):
        model(x)
    with attached(model, gs.Scale(10.0), gs.Inputs("append", path="total")):
        model(x).backward()
    assert grad_of(x) == [20.0]


def test_a_residual_around_a_reentrant_checkpoint_is_not_in_the_total_inside() -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = Double()

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1
            return (h + recomputed(self.f, h, True)).sum()

    model, x = Past(), point()
    with attached(model, gs.Scale(10.0), gs.Inputs("f", path="total")):
        model(x).backward()
    assert grad_of(x) == [1.0 + 20.0]


def test_a_module_without_a_floating_input_is_reported() -> None:
    model = nn.Sequential(nn.Embedding(3, 2))
    with (
        pytest.warns(gs.SurgeryWarning, match=r"0#0\.input \(takes no floating tensor\)"),
        attached(model, gs.Zero(), gs.Inputs("0")),
    ):
        model(INTEGERS).sum().backward()


def test_the_value_is_the_input_of_the_module() -> None:
    for path in PATHS:
        model, x = nn.Sequential(Double(), Double()), point(1.0, -1.0)
        transform = gs.ScaleBySign(positive=10.0, negative=0.0, of="value")
        with attached(model, transform, gs.Inputs("1", path=path)):
            model(x).sum().backward()
        assert grad_of(x) == [40.0, 0.0]


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
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(Double())

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1
            return (h + self.block(h)).sum()

    model, x = Past(), point()
    noop = gs.Intervention(gs.Identity(), gs.Inputs("block"))
    clip = gs.Intervention(gs.Clip(0.5), gs.Inputs("block.0", path="total"))
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
    model, x = nn.Sequential(Double()), point()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    with attached(model, gs.Clip(1.0), gs.Inputs("0")):
        model(x).sum().backward()
    assert grad_of(x) == [3.0]


def test_an_alias_keeps_the_strides_of_its_tensor() -> None:
    seen = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.stride(), x.data_ptr()))
            return x * 2

    x = torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    model = nn.Sequential(Looks())
    with attached(model, gs.Identity(), gs.Inputs("0")):
        model(x).sum().backward()
    assert seen == [(x.stride(), x.data_ptr())]
    assert x.view_as(x).stride() != x.stride()


def test_a_call_aborted_by_a_foreign_hook_does_not_end_the_call_around_it() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Double()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except OSError:
                return x.mul_(2)

    def breaks(module: nn.Module, args: object) -> None:
        raise OSError("gone")

    model = nn.Sequential(Double(), Tries())
    model[1].inner.register_forward_pre_hook(breaks)
    with (
        pytest.raises(RuntimeError, match=r"'1#0\.input': the module wrote to its input"),
        attached(model, gs.Zero(), gs.Inputs("1*")),
    ):
        model(point())
