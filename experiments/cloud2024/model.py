"""An autoencoder that also returns its code, for a penalty on it."""

from math import prod

import torch
from torch import Tensor, nn


class Autoencoder(nn.Module):
    """An encoder and a decoder, each with a hidden layer; returns the outputs and the code.

    The outputs of the decoder (n, num_outputs) and the code (n, `code`) are concatenated. Its
    modules are `encoder` and `decoder`.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_outputs: int, *, code: int = 32, hidden: int = 128
    ) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), *layers(prod(input_shape), hidden, code))
        self.decoder = nn.Sequential(*layers(code, hidden, num_outputs))

    def forward(self, images: Tensor) -> Tensor:
        code = self.encoder(images)
        return torch.cat([self.decoder(code), code], dim=1)


def layers(num_inputs: int, hidden: int, num_outputs: int) -> list[nn.Module]:
    """Return the layers of a network with one hidden layer."""
    return [nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_outputs)]
