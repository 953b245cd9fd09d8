"""Outputs: which tensors are hooked, under which name, and with which gradient."""

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.contexts.table import README
from tests.nets import attached, gradients, num_hooks, sgd, small
from tests.sites.points import Double, Made, Shared, calls_of, grad_of, point, recomputed


def test_the_site_gets_the_gradient_of_the_module_output() -> None:
    plain, model = small(), small()
    outputs = []
    plain.act.register_forward_hook(lambda module, args, output: outputs.append(output))
    x = torch.ones(2, 6)
    y = plain(x).sum()
    (at_act,) = torch.autograd.grad(y, outputs[0], retain_graph=True)
    expected = torch.autograd.grad(outputs[0], plain.first.weight, at_act.clamp(-0.1, 0.1))[0]
    with attached(model, gs.Clip(0.1), gs.Outputs("act")) as live:
        model(x).sum().backward()
    torch.testing.assert_close(gradients(model)["first.weight"], expected)
    assert not torch.equal(at_act, at_act.clamp(-0.1, 0.1))
    assert calls_of(live) == {"act#0": 1}


@pytest.mark.parametrize(("kind", "grad_output"), [("Outputs", 1.0), ("ModuleGradients", 0.0)])
def test_a_full_backward_hook_of_the_user_sees_the_documented_gradients(
    kind: str, grad_output: float
) -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []
    model[1].register_full_backward_hook(
        lambda module, inputs, outputs: seen.append((inputs, outputs))
    )
    with attached(model, gs.Zero(), getattr(gs, kind)("1")):
        model(torch.ones(3, 2)).sum().backward()
    (((entering,), (leaving,)),) = seen
    assert leaving.unique().tolist() == [grad_output]
    assert entering.unique().tolist() == [0.0]
    text = README.read_text(encoding="utf-8")
    assert "Your own `register_full_backward_hook` at a module with `Outputs`" in text


def test_a_call_that_never_happens_is_an_error_after_the_first_forward() -> None:
    model = Shared()
    with (
        pytest.raises(LookupError, match="There were: twice#0, twice#1"),
        attached(model, gs.Zero(), gs.Outputs("twice", call=7)),
    ):
        model(point()).backward()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        output, (h, c) = self.lstm(x)
        return output.sum() + h.sum() + c.sum()


def test_every_tensor_of_a_nested_output_is_a_site() -> None:
    model = Recurrent()
    with attached(model, gs.Zero(), gs.Outputs("lstm")) as live:
        model(torch.ones(2, 1, 3)).backward()
    assert calls_of(live) == {"lstm#0.0": 1, "lstm#0.1.0": 1, "lstm#0.1.1": 1}
    assert not any(grad.any() for grad in gradients(model).values())


def test_modules_that_return_the_same_tensor_are_one_site_with_all_names() -> None:
    model = nn.Sequential(nn.Sequential(Double()))
    x = point()
    with attached(model, gs.Scale(10.0), gs.Outputs()) as live:
        model(x).sum().backward()
    assert grad_of(x) == [20.0]
    (entry,) = live.ledger
    assert (entry.site, entry.aliases) == ("0.0#0", ["0#0"])
    assert "0.0#0 = 0#0" in live.ledger.table()


class Bypassed(nn.Module):
    """Uses `h` twice: in front of and behind a module that returns its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = Double(), inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return (h + 3 * self.inner(h)).sum()


@pytest.mark.parametrize(
    "inner",
    [
        nn.Identity(),
        nn.Dropout(0.5).eval(),
        nn.Dropout(0.5, inplace=True).eval(),
        nn.Flatten(),
        nn.Sequential(nn.Identity()),
    ],
    ids=lambda inner: type(inner).__name__,
)
def test_the_output_of_a_module_that_returns_its_input_is_its_own_branch(inner: nn.Module) -> None:
    x = torch.ones(1, 1, requires_grad=True)
    model = Bypassed(inner)
    with attached(model, gs.Scale(10.0), gs.Outputs("inner")) as live:
        for _ in range(3):
            x.grad = None
            model(x).backward()
            assert grad_of(x) == [[2.0 + 2 * 3 * 10]]
    assert calls_of(live) == {"inner#0": 3}


def test_inputs_returned_inside_a_list_are_their_own_branches() -> None:
    x = point()
    model = nn.Sequential(Made(lambda self, x, y=None: [x, y]))
    with attached(model, gs.Scale(10.0), gs.Outputs("0")):
        first, second = model[0](x, y=x)
        (first + second + x).sum().backward()
    assert grad_of(x) == [10.0 + 10 + 1]


def test_a_returned_input_that_is_written_to_is_refused() -> None:
    model = nn.Sequential(Double(), nn.Identity(), nn.ReLU(inplace=True))
    with (
        pytest.warns(gs.SurgeryWarning, match="no gradient ever passed"),
        attached(model, gs.Scale(10.0), gs.Outputs("1")),
        pytest.raises(RuntimeError, match="'1' returned its input, which was then written to"),
    ):
        model(point())


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.soft = Made(lambda self: self.prompt, prompt=nn.Parameter(torch.ones(2)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.soft() * x).sum()


def test_a_parameter_returned_by_a_module_is_hooked_once_and_released() -> None:
    model = Prompted()
    with attached(model, gs.Scale(10.0), gs.Outputs("soft")) as live:
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2)).backward()
            assert gradients(model)["soft.prompt"].tolist() == [10.0, 10.0]
    assert calls_of(live) == {"soft#0": 3}
    assert num_hooks(model) == 0


def test_the_value_of_a_returned_parameter_is_its_current_one() -> None:
    model = Prompted()
    optimizer = sgd(model, lr=1.0)
    transform = gs.ScaleBySign(positive=3.0, negative=0.0, of="value")
    with attached(model, transform, gs.Outputs("soft"), optimizer):
        for expected, start in (([3.0, 3.0], 1.0), ([0.0, 0.0], -2.0)):
            assert model.soft.prompt.tolist() == [start, start]
            optimizer.zero_grad()
            model(torch.ones(2)).backward()
            assert gradients(model)["soft.prompt"].tolist() == expected
            optimizer.step()


def test_an_in_place_activation_has_a_site_of_its_own() -> None:
    # 2 comes to the ReLU, 1 if clipped; both times 10 behind it, times 10 before it, times 2.
    model = nn.Sequential(Double(), nn.ReLU(inplace=True), Double())
    plain, after, both = point(3.0, -3.0), point(3.0, -3.0), point(3.0, -3.0)
    model(plain).sum().backward()
    assert grad_of(plain) == [4.0, 0.0]
    with attached(model, gs.Clip(1.0), gs.Outputs("1")):
        model(after).sum().backward()
    assert grad_of(after) == [2.0, 0.0]
    with (
        attached(model, gs.Clip(1.0), gs.Outputs("1")),
        attached(model, gs.Scale(10.0), gs.Outputs("[01]")) as live,
    ):
        model(both).sum().backward()
    assert grad_of(both) == [200.0, 0.0]
    assert calls_of(live) == {"0#0": 1, "1#0": 1}
    assert [entry.aliases for entry in live.ledger] == [[], []]


def test_the_value_is_the_output_before_a_later_in_place_change() -> None:
    model, x = nn.Sequential(Double(), Made(lambda self, x: x.neg_())), point(1.0, -1.0)
    transform = gs.ScaleBySign(positive=10.0, negative=0.0, of="value")
    with attached(model, transform, gs.Outputs("0")):
        model(x).sum().backward()
    assert grad_of(x) == [-20.0, 0.0]


def test_an_in_place_module_that_changes_nothing_has_a_site_of_its_own() -> None:
    model = nn.Sequential(Double(), nn.Dropout(0.5, inplace=True).eval())
    x = point()
    with attached(model, gs.Scale(10.0), gs.Outputs()) as live:
        model(x).sum().backward()
    assert grad_of(x) == [200.0]
    assert [(entry.site, entry.aliases) for entry in live.ledger] == [
        ("0#0", []),
        ("1#0", []),
    ]


def test_a_call_inside_a_reentrant_checkpoint_is_the_one_of_the_forward() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.doubled = Double()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                y = recomputed(self.doubled, x, True)
                x = y * y
            return x.sum()

    # f(x) = (2 (2 x)^2)^2 = 64 x^4.
    seen: list[float] = []

    def note(grad: Tensor) -> Tensor:
        seen.append(grad.item())
        return grad

    model, x = Twice(), torch.tensor([1.0], requires_grad=True)
    with pytest.warns(gs.SurgeryWarning, match="plain callable"):
        surgery = gs.Surgery(gs.Intervention(note, gs.Outputs("doubled", call=0)))
    with surgery.attach(model):
        model(x).backward()
    # d/dy of (2 y^2)^2 = 16 y^3 at y = 2.
    assert seen == [128.0]
    assert grad_of(x) == [256.0]


def test_a_module_list_is_not_a_site() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Listed()
    with attached(model, gs.Scale(2.0), gs.Outputs()) as live:
        model(torch.ones(1, 2)).sum().backward()
    assert [entry.site for entry in live.ledger] == ["layers.0#0", "layers.1#0"]


def test_a_type_that_matches_no_module_is_refused_with_the_choices() -> None:
    with pytest.raises(LookupError, match="types: nothing matches 'Relu'.*Linear, ReLU.*'ReLU'"):
        gs.Outputs(types="Relu").find(small())


def test_a_name_that_is_not_the_first_of_a_module_is_told() -> None:
    class TwoNames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2))
            self.linear = self.inner[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = TwoNames()
    surgery = gs.Surgery(gs.Intervention(gs.Zero(), gs.Outputs("linear") | gs.Outputs("inner")))
    with (
        pytest.warns(gs.SurgeryWarning, match=r"linear#0 \(another name of inner\.0, which"),
        surgery.attach(model),
    ):
        model(torch.ones(1, 2)).sum().backward()
