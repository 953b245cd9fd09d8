"""Attacks by a ResNet, at a 2-norm and by signs."""

import torch
from gradsurg.experiments.wu2020.task import TransferResNets

from gradsurg.models.resnet import ResNet


def test_steps_by_signs_keep_the_bound_of_each_pixel_and_the_others_the_norm() -> None:
    torch.manual_seed(0)
    task = TransferResNets(norm=1.6, num_steps=6)
    data = task.load()
    images, labels = data.test_inputs[:20], data.test_targets[:20]
    model = ResNet(data.input_shape, data.num_outputs, width=4).eval()
    attacked = task.attacks(model, images, labels)
    largest = (attacked["_sign"] - images).abs().flatten(1).amax(1)
    torch.testing.assert_close(largest, torch.full_like(largest, 0.2))
    norms = (attacked[""] - images).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, 1.6))
    loss = torch.nn.functional.cross_entropy
    for name in ("", "_sign"):
        assert loss(model(attacked[name]), labels) > loss(model(images), labels)
    assert isinstance(task.other(data), ResNet)
