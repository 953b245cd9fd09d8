"""Use gradsurg without its extras, in a training loop of a user: base_install.py README.

A script, for an environment that has neither pytest nor the extra `run`. Nothing that is listed by
`dir(gradsurg)` may ask for another package, except `compare` and `load_study`.
"""

import re
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import gradsurg as gs
from gradsurg.plugins.registry import find, names

ASKING = "is not installed: pip install 'gradsurg[run]'"


def model_and_loader() -> tuple[nn.Sequential, torch.optim.SGD, list[tuple[torch.Tensor, ...]]]:
    """A small classifier, its optimizer and three batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    loader = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def step_with(intervention: gs.Intervention) -> gs.Live:
    """Train the classifier, with an intervention attached."""
    model, optimizer, loader = model_and_loader()
    with gs.Surgery(intervention).attach(model, optimizer) as live:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return live


def readme_loop(readme: Path) -> None:
    """The README's own loop as it stands."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", readme.read_text("utf-8"), re.DOTALL | re.M)
    model, optimizer, loader = model_and_loader()
    loss_fn = nn.functional.cross_entropy
    exec(code, {"model": model, "optimizer": optimizer, "loader": loader, "loss_fn": loss_fn})


def plugins() -> None:
    """Each transform, trigger and aggregator that needs no field, in a few steps."""
    used = []
    for kind in ("transforms", "triggers", "aggregators"):
        for plugin in (find(kind, stem) for stem in names(kind)):
            try:
                one = plugin()
            except (TypeError, ValueError):
                continue  # a field has no default
            used.append(plugin.__name__)
            try:
                if kind == "aggregators":
                    aggregate(one)
                elif kind == "triggers":
                    step_with(gs.Intervention(gs.Clip(0.01), when=one))
                else:
                    step_with(gs.Intervention(one))
            except ValueError:
                continue  # not for parameters, or not for two losses
    assert len(used) > 80, used


def aggregate(aggregator: object) -> None:
    """Train two losses with an aggregator, with conflicts measured."""
    model, optimizer, loader = model_and_loader()
    surgery = gs.Surgery(gs.Intervention(aggregator, at=gs.SharedParameters()))
    with surgery.attach(model, optimizer) as live:
        for x, y in loader:
            hidden = model[:2](x)
            loss = nn.functional.cross_entropy(model[2](hidden), y)
            optimizer.zero_grad()
            live.backward({"class": loss, "size": hidden.square().mean()})
            optimizer.step()
    assert live.conflicts.table()


def asks(call: object, *arguments: object) -> None:
    """A call raises ImportError with the command that installs the extra `run`."""
    try:
        call(*arguments)
    except ImportError as error:
        text = str(error)
    else:
        text = ""
    assert text.endswith(ASKING), f"{call}: {text}"


def main(readme: Path) -> None:
    warnings.simplefilter("ignore", gs.SurgeryWarning)  # of a trigger that does not fire so early
    for name in dir(gs):
        assert getattr(gs, name) is not None
    readme_loop(readme)
    plugins()
    live = step_with(gs.Intervention(gs.PerSample(gs.ClipGlobalNorm(0.1))))
    assert live.examples["per_sample"].table()
    live = step_with(gs.load("guided_backprop").interventions[0])
    assert live.effects.rows()
    clip = {"transform": {"_target_": "gradsurg.Clip", "value": 0.1}}
    assert gs.from_config(clip) == gs.Surgery(gs.Intervention(gs.Clip(0.1)))
    gs.testing.check_transform(gs.Clip(0.1), count=2)
    assert gs.list("clip").table()
    model, _, loader = model_and_loader()
    assert gs.gpm_basis(model, [x for x, _ in loader])
    assert gs.ogd_basis(model, loader)
    gs.check_ranks(model)
    asks(gs.compare, lambda: model, lambda model, surgery: 0.0, gs.Surgery())
    asks(gs.load_study, "runs/first")
    asks(find("tasks", "digits")().load)
    asks(find("tasks", "diabetes")().load)
    assert not {"polars", "altair", "numba", "sklearn", "scipy", "vl_convert"} & sys.modules.keys()
    print("ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
