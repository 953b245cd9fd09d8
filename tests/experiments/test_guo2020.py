"""An attack by one network on others: the norm of its perturbations, and who is tested."""

import pytest
import torch
from gradsurg.experiments.guo2020 import task as module
from gradsurg.experiments.guo2020.task import TransferDigits
from torch import Tensor, nn

from gradsurg.models.mlp import MLP


def test_every_perturbation_has_the_norm_and_other_networks_are_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tested: list[tuple[int, Tensor]] = []
    accuracy = module._accuracy

    def watched(networks: list[nn.Module], inputs: Tensor, labels: Tensor) -> float:
        tested.append((len(networks), inputs))
        return accuracy(networks, inputs, labels)

    monkeypatch.setattr(module, "_accuracy", watched)
    monkeypatch.setattr(module, "TRAINING", 30)
    torch.manual_seed(0)
    task = TransferDigits(norm=1.5, num_steps=3, num_targets=2)
    data = task.load()
    model = MLP(data.input_shape, data.num_outputs, hidden=(8,))
    numbers = task.examine(model, data).numbers
    assert [count for count, _ in tested] == [1, 2, 2, 2]
    for place in (0, 1, 3):
        moved = (tested[place][1] - data.test_inputs).flatten(1).norm(dim=1)
        torch.testing.assert_close(moved, torch.full_like(moved, 1.5))
    assert torch.equal(tested[2][1], data.test_inputs)
    assert numbers["target"] < numbers["target_noise"]
    assert abs(numbers["norm"] - 1.5) < 1e-5
