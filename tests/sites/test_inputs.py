"""Inputs: the gradient of one branch or of all uses, by place and by keyword."""

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.plugins.fields import FieldError
from tests.nets import (
    attached,
    backward,
    batch,
    gradients,
    noisy,
    num_hooks,
    sgd,
    small,
    train,
    weights,
)
from tests.sites.points import Double, Shared, calls_of, grad_of, point

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


def test_the_input_gradient_equals_that_of_autograd() -> None:
    plain, model = small(), small()
    taken = []
    plain.last.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    x = torch.ones(2, 6)
    (at_last,) = torch.autograd.grad(plain(x).sum(), taken[0], retain_graph=True)
    limit = at_last.abs().mean().item()
    expected = torch.autograd.grad(taken[0], plain.first.weight, at_last.clamp(-limit, limit))[0]
    for path in PATHS:
        model.zero_grad()
        with attached(model, gs.Clip(limit), gs.Inputs("last", path=path)):
            model(x).sum().backward()
        torch.testing.assert_close(gradients(model)["first.weight"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("call", "expected"), [(None, 100 * 4.0), (0, 40.0), (1, 40.0)])
def test_calls_of_a_shared_module_are_sites_of_their_own(
    path: Any, call: int | None, expected: float
) -> None:
    model, x = Shared(), point()
    at = gs.Inputs("twice", call=call, path=path)
    with attached(model, gs.Scale(10.0), at) as live:
        for _ in range(2):
            x.grad = None
            model(x * 1).backward()
    assert grad_of(x) == [expected]
    sites = ["twice#0.input", "twice#1.input"] if call is None else [f"twice#{call}.input"]
    assert calls_of(live) == dict.fromkeys(sites, 2)


def test_call_clips_the_gradient_of_that_call_alone() -> None:
    grads = []
    for call in (0, 1):
        model, x = Shared(), point()
        with attached(model, gs.Clip(1.5), gs.Inputs("twice", call=call)):
            model(x).backward()
        grads.append(grad_of(x))
    assert grads == [[1.5], [1.5 * 2]]


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


def test_a_single_keyword_tensor_is_named_by_its_keyword() -> None:
    model, x = Mixed(lambda mix, a: mix(value=a)), point()
    with attached(model, gs.Scale(10.0), gs.Inputs("mix")) as live:
        model(x).backward()
    assert grad_of(x) == [30.0]
    assert calls_of(live) == {"mix#0.input.value": 1}


@pytest.mark.parametrize("path", PATHS)
def test_a_tensor_given_twice_is_one_site_with_both_names(path: Any) -> None:
    model, x = Mixed(lambda mix, a: mix(a, again=a)), point()
    with attached(model, gs.Clip(6.0), gs.Inputs("mix", path=path)) as live:
        model(x).backward()
    assert grad_of(x) == [6.0]  # of 3 + 5
    (entry,) = live.ledger
    assert (entry.site, entry.aliases) == ("mix#0.input.0", ["mix#0.input.again"])


def test_self_attention_still_sees_that_its_inputs_are_the_same_tensor() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0].sum()

    torch.manual_seed(0)
    model, x = Attends(), torch.randn(2, 3, 8)
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


class Siblings(nn.Module):
    """Two modules that take the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Double(), Double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.left(x) * 3 + self.right(x)).sum()


def test_modules_that_take_the_same_tensor_share_a_total_and_have_separate_branches() -> None:
    total, branch = point(), point()
    model = Siblings()
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


@pytest.mark.parametrize("path", PATHS)
def test_a_leaf_passed_several_times_is_hooked_once(path: Any) -> None:
    model, x = nn.Sequential(Double()), point()
    with attached(model, gs.Scale(10.0), gs.Inputs("0", path=path)) as live:
        for _ in range(3):
            x.grad = None
            model(x).sum().backward()
            assert grad_of(x) == [20.0]
    assert calls_of(live) == {"0#0.input": 3}
    assert not x._backward_hooks


def test_a_parameter_as_input_can_be_a_branch_or_a_total() -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.ones(1))
            self.f = Double()

        def forward(self) -> Tensor:
            return (self.f(self.prompt) + self.prompt).sum()

    grads = []
    for path in PATHS:
        model = Prompted()
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


def test_an_input_that_is_returned_and_not_written_to_is_hooked() -> None:
    model, x = nn.Sequential(Double(), nn.Flatten(0), Double()), torch.ones(1, 2)
    with attached(model, gs.Scale(10.0), gs.Inputs("1")):
        model(x.requires_grad_()).sum().backward()
    assert grad_of(x) == [[40.0, 40.0]]


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


class Saved(nn.Module):
    """The inner modules run inside a checkpoint; d y^2 / dx = 32 x for y = 4 x."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(Double(), Double())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        assert isinstance(y, Tensor)
        return y.pow(2).sum()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("pattern", ["inner", "inner.0", "inner.1"])
def test_inside_both_kinds_of_checkpoint_a_gradient_passes_once(
    pattern: str, reentrant: bool, path: Any
) -> None:
    model, x = Saved(reentrant=reentrant), point(3.0)
    with attached(model, gs.Scale(10.0), gs.Inputs(pattern, path=path)) as live:
        for _ in range(2):
            x.grad = None
            model(x * 1 if path == "branch" else x).backward()
            assert grad_of(x) == [10 * 32 * 3.0]
    assert calls_of(live) == {f"{pattern}#0.input": 2}


def test_a_residual_around_a_reentrant_checkpoint_is_not_in_the_total_inside() -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = Double()

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1
            y = checkpoint(self.f, h, use_reentrant=True)
            assert isinstance(y, Tensor)
            return (h + y).sum()

    model, x = Past(), point()
    with attached(model, gs.Scale(10.0), gs.Inputs("f", path="total")):
        model(x).backward()
    assert grad_of(x) == [1.0 + 20.0]


@pytest.mark.parametrize("path", PATHS)
def test_a_call_without_gradients_is_left_alone(path: Any) -> None:
    model, x = Residual(), point()
    with attached(model, gs.Scale(10.0), gs.Inputs("f", path=path)) as live:
        with torch.no_grad():
            h = x.clone().requires_grad_()
            assert model(h).item() == 3.0
            assert not h._backward_hooks
        with torch.inference_mode():
            assert model(torch.ones(1)).item() == 3.0
        model(x).backward()
    assert "needs no gradient" not in live.ledger.table()
    assert calls_of(live) == {"f#0.input": 1}


def test_an_input_without_a_gradient_is_reported() -> None:
    model = small()
    with (
        pytest.warns(gs.SurgeryWarning, match=r"first#0\.input \(needs no gradient\)"),
        attached(model, gs.Zero(), gs.Inputs("first")),
    ):
        backward(model)


def test_a_module_without_a_floating_input_is_reported() -> None:
    model = nn.Sequential(nn.Embedding(3, 2))
    with (
        pytest.warns(gs.SurgeryWarning, match=r"0#0\.input \(takes no floating tensor\)"),
        attached(model, gs.Zero(), gs.Inputs("0")),
    ):
        model(INTEGERS).sum().backward()


def test_a_call_that_never_happens_is_an_error_after_the_first_forward() -> None:
    model = Shared()
    with (
        pytest.raises(LookupError, match="There were: twice#0, twice#1"),
        attached(model, gs.Zero(), gs.Inputs("twice", call=7)),
    ):
        model(point()).backward()


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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("make", [small, noisy])
def test_an_identity_leaves_training_bit_identical(
    make: Callable[[], nn.Module], path: Any
) -> None:
    plain, model = make(), make()
    torch.manual_seed(1)
    train(plain, sgd(plain), 3)
    optimizer = sgd(model)
    torch.manual_seed(1)
    with attached(model, gs.Identity(), gs.Inputs(path=path), optimizer):
        train(model, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(model), strict=True))


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


def test_a_branch_changes_a_residual_only_by_the_order_of_its_sum() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * x.cos() + x.exp()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = Reads()

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1
            return (h + self.f(h)).pow(2).sum()

    torch.manual_seed(0)
    values = torch.randn(1000)
    plain, hooked = values.clone().requires_grad_(), values.clone().requires_grad_()
    model = Block()
    model(plain).backward()
    with attached(model, gs.Identity(), gs.Inputs("f")):
        model(hooked).backward()
    assert plain.grad is not None
    assert hooked.grad is not None
    torch.testing.assert_close(hooked.grad, plain.grad)
    assert not torch.equal(hooked.grad, plain.grad)  # else the docstring can promise more


@pytest.mark.parametrize("path", PATHS)
def test_hooks_are_removed_after_the_block_and_after_an_exception(path: Any) -> None:
    model, x = small(), point(*[1.0] * 6)
    before = num_hooks(model)
    with (
        pytest.raises(OSError, match="gone"),
        attached(model, gs.Zero(), gs.Inputs(path=path)),
    ):
        assert num_hooks(model) > before
        model(x).sum().backward()
        raise OSError("gone")
    assert num_hooks(model) == before
    assert not x._backward_hooks


@pytest.mark.parametrize("path", PATHS)
def test_a_graph_that_outlives_the_block_is_not_transformed(path: Any) -> None:
    model, x = Residual(), point()
    with attached(model, gs.Scale(10.0), gs.Inputs("f", path=path)):
        model(point()).backward()
        loss = model(x)
    loss.backward()
    assert grad_of(x) == [3.0]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_kept_alive(path: Any) -> None:
    class Marked(Double):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(ref(x))
            return super().forward(x)

    alive: list[ref[Any]] = []
    model = nn.Sequential(Marked(), nn.Flatten(0), Marked())
    model_ref = ref(model)
    transform = gs.ScaleBySign(of="value")
    with attached(model, transform, gs.Inputs(path=path), effects_every=0):
        for _ in range(2):
            y = model(torch.ones(2, 2, requires_grad=True) * 1)
            alive.append(ref(y))
            y.sum().backward()
            del y
            gc.collect()
            assert [held() for held in alive] == [None] * len(alive)
        unused = model(torch.ones(2, 2, requires_grad=True) * 1)
        alive.append(ref(unused))
        del unused
        gc.collect()
        assert [held() for held in alive] == [None] * len(alive)
    del model
    gc.collect()
    assert model_ref() is None


def test_an_exception_in_the_forward_leaves_no_state() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if broken:
                raise OSError("gone")
            return x * 2

    model, x, broken = nn.Sequential(nn.Sequential(Double(), Breaks())), point(), True
    with attached(model, gs.Scale(10.0), gs.Inputs("0.*")) as live:
        with pytest.raises(OSError, match="gone"):
            model(x)
        broken = False
        model(x).sum().backward()
    assert grad_of(x) == [400.0]
    assert calls_of(live) == {"0.0#0.input": 1, "0.1#0.input": 1}


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


def test_selectors_combine() -> None:
    def sites(at: Any) -> dict[str, int]:
        model, x = small(), point(*[1.0] * 6)
        with attached(model, gs.Identity(), at) as live:
            model(x).sum().backward()
        return calls_of(live)

    assert sites(gs.Inputs("first") | gs.Inputs("last")) == {"first#0.input": 1, "last#0.input": 1}
    assert sites(~gs.Inputs("re:first|last")) == {"act#0.input": 1}
    assert sites(gs.Inputs() & ~gs.Inputs(types="Linear")) == {"act#0.input": 1}
    assert sites(gs.Inputs().first(1)) == {"first#0.input": 1}
    assert sites(gs.Inputs("last").expect(1)) == {"last#0.input": 1}
    both = gs.Inputs("first") | gs.Inputs("first", path="total") | gs.Outputs("first")
    assert sites(both) == {"first#0.input": 2, "first#0": 1}
    with pytest.raises(LookupError, match="4 sites were expected, found 3"):
        sites(gs.Inputs("*t").expect(4))


def test_a_pattern_that_matches_nothing_lists_the_choices() -> None:
    with (
        pytest.raises(LookupError, match="Inputs.pattern: nothing matches 'frist'.*mean 'first'"),
        attached(small(), gs.Zero(), gs.Inputs("frist")),
    ):
        pass


@pytest.mark.parametrize("field", [{"pattern": ""}, {"call": -1}, {"path": "both"}])
def test_invalid_fields_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=rf"Inputs\.{next(iter(field))}"):
        gs.Inputs(**field)


@pytest.mark.parametrize("path", PATHS)
def test_it_acts_in_the_lower_precision_of_autocast_and_on_scaled_losses(path: Any) -> None:
    model, x = small(), batch()[0].requires_grad_()
    seen = []

    def look(grad: Tensor) -> Tensor:
        seen.append(grad.dtype)
        return grad * 2

    with pytest.warns(gs.SurgeryWarning, match="plain callable"):
        surgery = gs.Surgery(gs.Intervention(look, gs.Inputs("last", path=path)))  # pyright: ignore[reportArgumentType]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = sgd(model)
    with (
        pytest.warns(gs.SurgeryWarning, match="a GradScaler makes the steps"),
        surgery.attach(model, optimizer),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x), batch()[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen == [torch.bfloat16]
    assert scaler.get_scale() == 1024.0


def test_a_transform_that_the_loss_scale_would_spoil_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    surgery = gs.Surgery(gs.Intervention(gs.Clip(1.0), gs.Inputs("last")))
    with (
        pytest.raises(ValueError, match="sees gradients times the loss scale"),
        surgery.attach(small(), scaler=scaler),
    ):
        pass


@pytest.mark.parametrize("path", PATHS)
def test_it_acts_inside_functional_transforms(path: Any) -> None:
    model = Residual()
    values = torch.tensor([[1.0], [2.0]])
    with attached(model, gs.Scale(10.0), gs.Inputs("f", path=path), effects_every=0):
        grad = torch.func.grad(model)(values[0])
        each = torch.func.vmap(torch.func.grad(model))(values)
    expected = 21.0 if path == "branch" else 30.0
    assert grad.tolist() == [expected]
    assert each.tolist() == [[expected], [expected]]


@pytest.mark.parametrize("path", PATHS)
def test_a_double_backward_goes_through_it(path: Any) -> None:
    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(3)

    model, x = nn.Sequential(Cube()), point(2.0)
    with attached(model, gs.Scale(10.0), gs.Inputs("0", path=path)):
        (first,) = torch.autograd.grad(model(x * 1), x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    # 10 * 3 x^2, and of that 10 * 6 x, which passes the site once more.
    assert (first.item(), second.item()) == (120.0, 1200.0)


def test_threads_count_their_calls_separately() -> None:
    model, barrier = Shared(), threading.Barrier(2)
    results: list[list[Any]] = []

    def wait(module: nn.Module, args: object, output: object) -> None:
        barrier.wait(timeout=10)

    def work() -> None:
        x = point()
        model(x).backward()
        results.append(grad_of(x))

    handle = model.twice.register_forward_hook(wait)
    with attached(model, gs.Scale(10.0), gs.Inputs("twice"), effects_every=0) as live:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    handle.remove()
    assert results == [[400.0], [400.0]]
    assert sorted(calls_of(live)) == ["twice#0.input", "twice#1.input"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.filterwarnings("ignore")  # Dynamo trips over its own warnings when they are errors
def test_inputs_can_be_hooked_before_a_model_is_compiled(path: Any) -> None:
    model, x = Residual(), point()
    with attached(model, gs.Scale(10.0), gs.Inputs("f", path=path), effects_every=0):
        torch.compile(model, backend="eager")(x).backward()
    assert grad_of(x) == [21.0 if path == "branch" else 30.0]
