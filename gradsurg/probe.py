"""A trial of a surgery on a model that is thrown away: what could not act is found before a run."""

import warnings

import torch
from torch import nn

from gradsurg.intervention import Intervention
from gradsurg.ledger import SurgeryWarning
from gradsurg.make import Config
from gradsurg.sites.base import Selector
from gradsurg.surgery import Surgery
from gradsurg.tasks.base import Data
from gradsurg.transforms.identity import Identity


def culprit(site: Config) -> str:
    """The key to which it is due if a selector does not find what it should."""
    if site.get("module", "*") != "*":
        return "site.module"
    return "site.pattern" if "pattern" in site else "site"


def probe(
    selector: Selector, intervention: Intervention | None, model: nn.Module, data: Data
) -> None:
    """Attach to a throw-away model and let two examples through: what matches nothing fails now."""
    at = intervention or Intervention(Identity(), selector)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # No gradient will pass here, which is what the ledger would warn of.
        warnings.simplefilter("ignore", SurgeryWarning)
        with Surgery(at).attach(model, optimizer, effects_every=0):
            model(data.train_inputs[:2])
