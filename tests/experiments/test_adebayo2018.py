"""Saliency maps: their comparison, and the state after an examination."""

import numpy as np
import pytest
import torch
from gradsurg.experiments.adebayo2018.task import (
    Saliency,
    drawn_anew,
    maps,
    rank_correlation,
    ssim,
)
from scipy.stats import spearmanr
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.models.convnet import Convnet
from gradsurg.models.linear import Linear
from gradsurg.models.mlp import MLP
from gradsurg.models.vit import ViT
from gradsurg.plugins.fields import FieldError

MEASURES = ("rank", "abs_rank", "ssim")


def images(count: int = 5, channels: int = 1, side: int = 9) -> Tensor:
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(0))


def with_ties(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (6, 1, 4, 5), generator=generator).float()


def test_the_rank_correlation_is_that_of_scipy_with_ties_too():
    for first, second in [(images(), images().exp().roll(1, dims=2)), map(with_ties, (1, 2))]:
        pairs = zip(first.flatten(1).numpy(), second.flatten(1).numpy(), strict=True)
        expected = [spearmanr(a, b).statistic for a, b in pairs]
        assert rank_correlation(first, second).tolist() == pytest.approx(expected)


def test_the_rank_correlation_is_1_with_itself_and_minus_1_with_its_opposite_and_knows_signs():
    some = images()
    assert rank_correlation(some, some**3).tolist() == pytest.approx([1.0] * 5)
    assert rank_correlation(some, -some).tolist() == pytest.approx([-1.0] * 5)
    assert rank_correlation(some.abs(), (-some).abs()).tolist() == pytest.approx([1.0] * 5)


@pytest.mark.parametrize("compare", [rank_correlation, ssim])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_map_that_is_not_finite_is_like_no_other_and_not_like_itself(compare, bad):
    some, broken = images(), images()
    broken[1, 0, 2, 3] = bad
    for found in (compare(some, broken), compare(broken, some), compare(broken, broken)):
        assert found.isnan().tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("compare", [rank_correlation, ssim])
def test_a_constant_map_gives_a_finite_number(compare):
    some, none = images(), torch.zeros(5, 1, 9, 9)
    for found in (compare(some.abs(), none), compare(none, some.abs())):
        assert found.abs().max() < 0.1
    assert compare(none, none).isfinite().all()
    assert rank_correlation(some, none).tolist() == [0.0] * 5


def slow_ssim(a: np.ndarray, b: np.ndarray, side: int) -> float:
    """Of one channel, window by window."""
    a, b = a / np.abs(a).max(), b / np.abs(b).max()
    found = []
    for y in range(a.shape[0] - side + 1):
        for x in range(a.shape[1] - side + 1):
            u, v = (one[y : y + side, x : x + side].ravel() for one in (a, b))
            (var_u, cov), (_, var_v) = np.cov(u, v)
            top = (2 * u.mean() * v.mean() + 0.01**2) * (2 * cov + 0.03**2)
            bottom = (u.mean() ** 2 + v.mean() ** 2 + 0.01**2) * (var_u + var_v + 0.03**2)
            found.append(top / bottom)
    return float(np.mean(found))


@pytest.mark.parametrize(("side", "window"), [(9, 7), (7, 7), (5, 5)])
def test_the_structural_similarity_is_that_of_a_slow_second_version(side, window):
    first, second = images(side=side).abs(), images(side=side).roll(1, dims=0).abs() + 0.3
    expected = [
        slow_ssim(a[0].astype(float), b[0].astype(float), window)
        for a, b in zip(first.numpy(), second.numpy(), strict=True)
    ]
    assert ssim(first, second).tolist() == pytest.approx(expected)


def test_a_map_is_the_gradient_of_the_score_of_the_class():
    model, some = Linear((1, 9, 9), 3), images()
    (weight,) = (param for param in model.parameters() if param.ndim == 2)
    nn.init.normal_(weight)
    classes = torch.tensor([0, 2, 1, 1, 0])
    assert torch.equal(maps(model, some, classes), weight[classes].view(5, 1, 9, 9).detach())
    assert all(param.grad is None for param in model.parameters())


def test_clamped_at_its_relus_a_model_gives_the_maps_of_guided_backprop():
    torch.manual_seed(0)
    model, some = MLP((1, 9, 9), 3, hidden=(20, 20)), images()
    classes = torch.tensor([0, 2, 1, 1, 0])
    surgery = Surgery(Intervention(gs.Clamp(low=0.0, high=None), gs.Nodes("Relu", side="leave")))
    with surgery.attach(model):
        found = maps(model, some, classes)
    first, second = model.hidden[0].linear, model.hidden[1].linear
    below = first(some.flatten(1))
    above = second(below.relu())
    grad = model.output.weight[classes]
    grad = (grad * (above > 0)).clamp(min=0) @ second.weight
    grad = (grad * (below > 0)).clamp(min=0) @ first.weight
    torch.testing.assert_close(found, grad.view_as(some).detach())
    assert not torch.allclose(found, maps(model, some, classes))


def test_layers_are_drawn_anew_from_the_top_and_put_back():
    torch.manual_seed(0)
    model = Convnet((1, 8, 8), 3, hidden=(4,))
    names = ["output", "hidden.0.fc", "blocks.1.conv", "blocks.0.conv"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    met = []
    for name in drawn_anew(model):
        met.append(name)
        changed = {
            key.rpartition(".")[0]
            for key, tensor in model.state_dict().items()
            if not torch.equal(tensor, before[key])
        }
        assert changed == set(met)
    assert met == names
    assert_as(model, before)


def assert_as(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_layer_that_cannot_draw_itself_is_refused_by_name():
    with pytest.raises(ValueError, match=r"must have reset_parameters .* the model itself \(ViT\)"):
        next(drawn_anew(ViT((1, 8, 8), 3)))


def test_an_examination_has_each_measure_of_each_layer_and_keeps_pictures():
    torch.manual_seed(0)
    task = Saliency(num_maps=6, num_kept=2)
    data = task.load()
    model = Convnet(data.input_shape, data.num_outputs, hidden=(8,)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = task.examine(model, data)
    layers = ["output", "hidden.0.fc", "blocks.1.conv", "blocks.0.conv"]
    assert set(found.numbers) == {f"{m}/{layer}" for m in MEASURES for layer in layers}
    assert all(-1 <= number < 0.9 for number in found.numbers.values())
    assert list(found.saved["maps"]) == ["trained", *layers]
    with torch.no_grad():
        classes = model(data.test_inputs[:2]).argmax(dim=1)
    assert found.saved["classes"] == classes.tolist()
    trained = maps(model, data.test_inputs[:2], classes)[:, 0]
    pictures = np.array(found.saved["maps"]["trained"])
    for picture, values in zip(pictures, trained.numpy(), strict=True):
        np.testing.assert_allclose(picture, values / np.abs(values).max(), atol=6e-5)
    assert_as(model, before)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ({"root": "there"}, [("root", "must be null with data=digits, found 'there'")]),
        ({"num_test": 5}, [("num_test", "must be null with data=digits, found 5")]),
        ({"num_maps": 0}, [("num_maps", "must be >= 1, found 0")]),
        (
            {"data": "cifar"},
            [("data", "must be one of 'digits', 'mnist' or 'fashion_mnist', found 'cifar'")],
        ),
    ],
)
def test_wrong_fields_are_refused(options, faults):
    with pytest.raises(FieldError) as caught:
        Saliency(**options)
    assert caught.value.faults == faults
