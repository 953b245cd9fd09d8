"""One-hot codes of the entries of an addition table."""

import torch
from gradsurg.experiments.prieto2025.task import OneHotModular

from gradsurg.tasks.modular import Modular


def test_the_codes_are_of_the_two_numbers_and_the_entries_those_of_modular() -> None:
    codes, tokens = OneHotModular(modulus=5).load(), Modular(modulus=5, train_fraction=0.6).load()
    a, b = codes.train_inputs.argmax(dim=2).unbind(dim=1)
    assert torch.equal(codes.train_inputs.sum(dim=2), torch.ones(15, 2))
    assert torch.equal((a + b) % 5, codes.train_targets)
    assert torch.equal(torch.stack([a, b], dim=1), tokens.train_inputs[:, :2])
    assert codes.num_tokens is None
    assert codes.input_shape == (2, 5)
