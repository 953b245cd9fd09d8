"""Two views of an image: how they are made, metrics by hand, and the branch that SimSiam stops."""

from math import sqrt

import pytest
import torch
from gradsurg.experiments.chen2021.model import Siamese
from gradsurg.experiments.chen2021.task import TwoViews
from torch import Tensor

import gradsurg as gs
from gradsurg.plugins.fields import FieldError

SHAPE = (2, 1, 8, 8)


def views_of(images: Tensor, **options: float) -> Tensor:
    return TwoViews(**options).views(images, torch.Generator().manual_seed(0))


def test_a_view_of_the_whole_image_without_noise_is_the_image_or_its_mirror() -> None:
    images = torch.randn(40, 2, 5, 6)
    pairs = views_of(images, min_side=1, noise=0)
    assert pairs.shape == (40, 2, 2, 5, 6)
    mirrored = 0
    for image, pair in zip(images, pairs, strict=True):
        for view in pair:
            same, other = ((view - one).abs().max() < 1e-5 for one in (image, image.flip(2)))
            assert same or other
            mirrored += int(other)
    assert 20 < mirrored < 60


def test_a_view_is_a_part_of_the_image_at_least_so_large() -> None:
    ramp = torch.linspace(-1, 1, 101)
    columns = ramp.expand(1, 101, 101)
    images = torch.stack([columns, columns.mT]).repeat(200, 1, 1, 1)
    views = views_of(images, min_side=0.5, noise=0).flatten(0, 1)
    spans = views.amax(dim=(1, 2, 3)) - views.amin(dim=(1, 2, 3))
    assert 0.98 < spans.min() < 1.1
    assert 1.8 < spans.max() <= 2
    assert views.max() > 0.95
    assert views.min() < -0.95


def test_noise_has_its_deviation_and_is_of_each_view() -> None:
    pairs = views_of(torch.zeros(500, 1, 8, 8), noise=0.3)
    assert pairs.std().item() == pytest.approx(0.3, rel=0.02)
    assert not torch.equal(pairs[:, 0], pairs[:, 1])


def test_views_follow_from_their_seed_and_leave_the_labels_alone() -> None:
    data, other = TwoViews().load(), TwoViews(data_seed=1).load()
    assert data.input_shape == SHAPE
    assert not torch.equal(data.train_inputs, other.train_inputs)
    assert torch.equal(data.train_targets, other.train_targets)


def test_loss_and_spread_match_a_calculation_by_hand() -> None:
    p1, p2 = torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0], [5.0, 0.0]])
    z1, z2 = torch.tensor([[7.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    metrics = TwoViews(size=2).metrics(torch.cat([p1, p2, z1, z2], dim=1), torch.tensor([1, 1]))
    # cos(p1, z2) is 1 and -1, cos(p2, z1) is 1 / sqrt(2) and 0. Each coordinate of z1 is 1 and 0.
    expected = {"loss": -(1 / sqrt(2)) / 4, "spread": 0.5 * sqrt(2), "knn_accuracy": 1.0}
    assert metrics == pytest.approx(expected)


def test_the_spread_is_1_of_all_directions_and_0_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(5000, 4 * 16, generator=generator)
    task, labels = TwoViews(size=16), torch.zeros(5000, dtype=torch.int64)
    assert task.metrics(directions, labels)["spread"] == pytest.approx(1, abs=0.02)
    same = directions[:1] * (0.1 + torch.rand(5000, 1, generator=generator))
    assert task.metrics(same, labels)["spread"] == pytest.approx(0, abs=1e-5)


def test_most_of_the_ten_nearest_others_vote() -> None:
    # Eleven in one direction, of which one has another label: it is classified wrong, the others
    # right.
    outputs = torch.tensor([[1.0, 0.0]] * 11 + [[0.0, 1.0]] * 11).repeat(1, 4)
    labels = torch.tensor([0] * 10 + [1] + [1] * 11)
    metrics = TwoViews(size=2).metrics(outputs, labels)
    assert metrics["knn_accuracy"] == pytest.approx(21 / 22)


@pytest.mark.parametrize(
    ("shape", "num_outputs", "fault"),
    [
        ((1, 8, 8), 8, ("input_shape", "must be (2, channels, height, width), found (1, 8, 8)")),
        (SHAPE, 10, ("num_outputs", "must be four times the size of an embedding, found 10")),
    ],
)
def test_a_siamese_refuses_inputs_that_are_not_pairs(
    shape: tuple[int, ...], num_outputs: int, fault: tuple[str, str]
) -> None:
    with pytest.raises(FieldError) as caught:
        Siamese(shape, num_outputs)
    assert caught.value.faults == [fault]


@pytest.mark.parametrize("output_norm", [False, True])
def test_a_siamese_has_batch_norm_at_hidden_layers_and_at_the_output_if_asked(
    output_norm: bool,
) -> None:
    model = Siamese(SHAPE, 8, channels=(3,), output_norm=output_norm)
    norms = [name for name, part in model.named_modules() if "BatchNorm" in type(part).__name__]
    last = ["projector.output_norm"] if output_norm else []
    assert norms == ["encoder.blocks.0.norm", "projector.norm", *last, "predictor.norm"]


def test_both_views_go_through_the_same_weights() -> None:
    torch.manual_seed(0)
    model = Siamese(SHAPE, 8, channels=(3,)).eval()
    pairs = torch.randn(5, *SHAPE)
    p1, p2, z1, z2 = model(pairs).chunk(4, dim=1)
    torch.testing.assert_close(model(pairs.flip(1)), torch.cat([p2, p1, z2, z1], dim=1))
    torch.testing.assert_close(p1, model.predictor(z1))


def test_zero_at_the_target_is_a_detach_there_and_nowhere_else() -> None:
    torch.manual_seed(0)
    task = TwoViews(size=4)
    model = Siamese(SHAPE, 16, channels=(3,))
    pairs, labels = torch.randn(6, *SHAPE), torch.zeros(6, dtype=torch.int64)

    def gradients(outputs: Tensor) -> list[Tensor]:
        loss = task.loss(outputs, labels)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    predictions, targets = model(pairs).chunk(2, dim=1)
    expected = gradients(torch.cat([predictions, targets.detach()], dim=1))
    surgery = gs.Surgery(gs.Intervention(gs.Zero(), at=gs.Inputs("target")))
    with surgery.attach(model):
        found = gradients(model(pairs))
    torch.testing.assert_close(found, expected)
    plain = gradients(model(pairs))
    assert not torch.allclose(plain[0], expected[0])
    # On the tensor itself nothing is left of the predictions' gradient either.
    total = gs.Surgery(gs.Intervention(gs.Zero(), at=gs.Inputs("target", path="total")))
    with total.attach(model):
        assert not any(grad.any() for grad in gradients(model(pairs))[:1])
