"""A state that an earlier version has saved is loaded, and training continues as it did there."""

import pytest
import torch

import gradsurg as gs
from tests.nets import grad_of, sgd
from tests.sites.points import Sums

PLACE = "Parameters(pattern='*', types='*', depth=None, index=None, ndim=None, size=None, stage="
MOMENTUM = "Momentum(decay=0.5, average=False, debias=False, nesterov=False)"
FIRES = "Threshold(above=2.0, measure='mean_abs', release=1.0, q=0.99, source='grad')"
SAVED = {
    "step": 2,
    "epoch": 0,
    "backwards": 0,
    "flags": {},
    "transforms": [
        f"GrokfastEMA(decay=0.5, strength=1.0) at {PLACE}None)",
        f"SkipUpdate(max_norm=5.0) at {PLACE}None)",
        f"Chain({MOMENTUM}, {MOMENTUM}) at {PLACE}'step')",
    ],
    "states": {
        "grokfast_ema/w/when": {FIRES: torch.tensor(True)},
        "grokfast_ema/w": {"mean": torch.tensor([2.75]), "started": torch.tensor(True)},
        "skip_update/group": {"skipped": torch.tensor(1)},
        "momentum/w": {"momentum": torch.tensor([4.25])},
        "momentum_2/w": {"momentum": torch.tensor([4.25])},
    },
}
"""As saved by commit f170ac1a after the gradients 4 and 1.5."""


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_saved_state_has_the_same_keys_and_goes_on_from_them(is_loaded: bool) -> None:
    model = Sums()
    optimizer = sgd(model, lr=0.0)
    surgery = gs.Surgery(
        gs.Intervention(gs.GrokfastEMA(0.5, 1.0), when=gs.Threshold(2.0, release=1.0)),
        gs.Intervention(gs.SkipUpdate(5.0)),
        gs.Intervention(gs.Chain(gs.Momentum(0.5), gs.Momentum(0.5)), gs.Parameters(stage="step")),
    )
    found = list[float]()
    with surgery.attach(model, optimizer) as live:
        if is_loaded:
            surgery.load_state_dict(SAVED)
        for x in (1.2, 0.5, 3.0) if is_loaded else (4.0, 1.5):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            found.append(grad_of(model.w).item())
        if is_loaded:
            assert found == pytest.approx([7.425, 6.8625, 5.4875])  # as that version went on
            assert live.skipped_steps == {"skip_update": 2}
        else:
            assert repr(surgery.state_dict()) == repr(SAVED)
