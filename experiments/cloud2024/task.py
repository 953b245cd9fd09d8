"""Autoencode digits; then let fresh decoders reconstruct them from each half of the code."""

from dataclasses import replace
from typing import Annotated

import torch
from gradsurg.experiments.cloud2024.model import layers
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Examination, Examined
from gradsurg.tasks.data.arrays import Count
from gradsurg.tasks.digits import NUM_PIXELS, Digits

HIDDEN, BATCH, RATE = 128, 256, 0.002  # of a fresh decoder, trained by Adam
BOUND = 10.0  # of standardized codes: a unit may be constant except on a few test examples
BORDER = 5  # digits below 5 belong to the first half of the code


@validated
class SplitDigits(Examined):
    """Reconstruct scikit-learn's digits, then test what each half of the code holds.

    The loss is the mean squared error of the pixels plus `l1` times the 1-norm of the code, mean
    over the examples; the model returns both. The targets (n, 65) are the pixels and the label.

    The examination trains, for each half of the code, a fresh decoder of `decoder_steps` steps on
    the codes of all training images. Its error on a test image is the squared error as a share of
    the mean squared distance of the test images from the mean training image. `own` is the mean
    error on the digits of the half (0 to 4 for the first, 5 to 9 for the second), and `away` the
    mean error on the other digits. Both are averages over the halves, and `gap` is away - own.
    `whole` is the error of the trained model.
    """

    l1: Annotated[float, Field(ge=0)] = 0.01
    decoder_steps: Count = 500

    def load(self) -> Data:
        data = Digits().load()
        return replace(
            data,
            train_targets=_with_labels(data.train_inputs, data.train_targets),
            test_targets=_with_labels(data.test_inputs, data.test_targets),
            num_outputs=NUM_PIXELS,
        )

    def labels(self, targets: Tensor) -> Tensor:
        return targets[:, NUM_PIXELS].long()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        error = functional.mse_loss(outputs[:, :NUM_PIXELS], targets[:, :NUM_PIXELS])
        return error + self.l1 * outputs[:, NUM_PIXELS:].abs().sum(1).mean()

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        error = functional.mse_loss(outputs[:, :NUM_PIXELS], targets[:, :NUM_PIXELS])
        return {"loss": self.loss(outputs, targets).item(), "error": error.item()}

    def examine(self, model: nn.Module, data: Data) -> Examination:
        device = next(model.parameters()).device
        train, test = data.train_targets[:, :NUM_PIXELS], data.test_targets[:, :NUM_PIXELS]
        train, test = train.to(device), test.to(device)
        with torch.no_grad():
            train_codes = model(data.train_inputs.to(device))[:, NUM_PIXELS:]
            outputs = model(data.test_inputs.to(device))
        variance = (test - train.mean(dim=0)).square().mean()
        is_low = [
            (self.labels(targets) < BORDER).to(device)
            for targets in (data.train_targets, data.test_targets)
        ]
        own, away, relearned = [], [], []
        halves = zip(train_codes.chunk(2, 1), outputs[:, NUM_PIXELS:].chunk(2, 1), strict=True)
        for half, (codes, test_codes) in enumerate(halves):
            trained, tested = [low if half == 1 else ~low for low in is_low]  # the other digits
            errors = self._errors(codes, train, test_codes, test) / variance
            own.append(errors[~tested].mean())
            away.append(errors[tested].mean())
            codes, test_codes = codes[trained], test_codes[tested]
            mean, deviation = codes.mean(dim=0), codes.std(dim=0).clamp(min=1e-12)
            codes, test_codes = (
                ((part - mean) / deviation).clamp(-BOUND, BOUND) for part in (codes, test_codes)
            )
            errors = self._errors(codes, train[trained], test_codes, test[tested]) / variance
            relearned.append(errors.mean())
        whole = (outputs[:, :NUM_PIXELS] - test).square().mean() / variance
        numbers = {"own": torch.stack(own).mean(), "away": torch.stack(away).mean()}
        numbers |= {"gap": numbers["away"] - numbers["own"], "whole": whole}
        numbers |= {"relearned": torch.stack(relearned).mean()}
        return Examination({name: number.item() for name, number in numbers.items()})

    def _errors(self, codes: Tensor, images: Tensor, test_codes: Tensor, test: Tensor) -> Tensor:
        """Train a decoder from codes to images; return its squared error on each test image."""
        decoder = nn.Sequential(*layers(codes.shape[1], HIDDEN, NUM_PIXELS)).to(codes.device)
        optimizer = torch.optim.Adam(decoder.parameters(), lr=RATE)
        for _ in range(self.decoder_steps):
            batch = torch.randint(len(codes), (BATCH,))
            optimizer.zero_grad()
            functional.mse_loss(decoder(codes[batch]), images[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            return (decoder(test_codes) - test).square().mean(dim=1)


def _with_labels(images: Tensor, labels: Tensor) -> Tensor:
    """Return the pixels of each image and its label, (n, 65)."""
    return torch.cat([images.flatten(1), labels[:, None].float()], dim=1)
