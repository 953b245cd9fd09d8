"""A surgery as a config: an equal one is made of it, and what no config can hold is refused."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.experiment.making import make
from gradsurg.multitask.aggregation import check_trigger
from gradsurg.plugins.registry import CONFIG_DIR
from gradsurg.sites.places import Place, Selector
from gradsurg.transforms import Stateless, validated
from gradsurg.triggers.base import Trigger
from tests.aggregators import cases as aggregators
from tests.transforms import cases as transforms


def halve(grad: Tensor) -> Tensor:
    return grad * 0.5


def times(grad: Tensor, factor: float) -> Tensor:
    return grad * factor


@validated
class Shrink(Stateless):
    factor: float = 0.5

    def apply(self, grad: Tensor, context: object) -> Tensor:
        return grad * self.factor


def of_group(group: str, base: Any) -> Iterator[Any]:
    """Yield the object of each option of a group."""
    for path in sorted((CONFIG_DIR / group).glob("*.yaml")):
        yield make(yaml.safe_load(path.read_text(encoding="utf-8")), base)


TRANSFORMS = [transforms.build(row.name, row.fields) for row in transforms.ROWS]
TRANSFORMS += [transforms.build(name) for name in transforms.names()]
AGGREGATORS = [aggregators.made(row.name, **row.fields) for row in aggregators.ROWS]
SITES = [*of_group("site", Selector), gs.Parameters(stage="step"), gs.Updates("*.weight")]
SITES += [gs.Inputs(types=nn.ReLU, depth=2), gs.Nodes("Addmm", side="leave", edge=1)]
SHARED = [gs.SharedParameters(), gs.SharedParameters(granularity=("a.*", "*"), engine="full")]
SHARED += [gs.SharedParameters("*.weight", granularity="layer", on_nonfinite="skip")]
TRIGGERS = [gs.Always(), gs.Steps(), gs.Threshold(0.5, "nan"), *of_group("when", Trigger)]
TRIGGERS = [each for each in TRIGGERS if getattr(each, "source", "") != "value"]
NAMES = st.sampled_from([(), ("a",), ("1e5",), ("b.c", "d"), ("same", "same")])


@st.composite
def selectors(draw: st.DrawFn) -> Selector:
    """Return a selector, or a combination of some."""
    site = draw(st.sampled_from(SITES))
    for how in draw(st.lists(st.sampled_from("|&~fe"), max_size=3)):
        other = draw(st.sampled_from(SITES))
        try:
            match how:
                case "|":
                    site = site | other
                case "&":
                    site = site & other
                case "~":
                    site = ~site
                case "f":
                    site = site.first(2)
                case "e":
                    site = site.expect(3)
        except ValueError:  # they have no sites in common, or a number is expected already
            continue
    return site


def joined(triggers: st.SearchStrategy[Trigger]) -> st.SearchStrategy[Trigger]:
    pairs = st.tuples(triggers, triggers)
    either = pairs.map(lambda pair: pair[0] | pair[1])
    return pairs.map(lambda pair: pair[0] & pair[1]) | either | triggers.map(lambda one: ~one)


WHEN = st.recursive(st.sampled_from(TRIGGERS), joined, max_leaves=3)


@st.composite
def interventions(draw: st.DrawFn) -> gs.Intervention:
    if draw(st.booleans()):
        transform, at = draw(st.sampled_from(AGGREGATORS)), draw(st.sampled_from(SHARED))
    else:
        links = draw(st.lists(st.sampled_from([*TRANSFORMS, halve, torch.sign]), max_size=3))
        try:
            transform = links[0] if len(links) == 1 else gs.Chain(*links)
        except ValueError:  # a link must be the first
            transform = links[0]
        at = draw(selectors())
    when = draw(WHEN)
    try:
        if isinstance(at, gs.SharedParameters):
            check_trigger(when, "")  # as attaching does
        return gs.Intervention(transform, at, when, draw(NAMES))
    except ValueError:  # they do not fit
        assume(False)
        raise


@given(st.lists(interventions(), max_size=3), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_any_surgery_is_made_again_of_its_config(items: list[gs.Intervention], seed: int) -> None:
    surgery = gs.Surgery(*items, seed=seed)
    config = surgery.to_config()
    again = gs.from_config(config, own_code=True)
    assert again == surgery
    assert hash(again) == hash(surgery)
    assert repr(again) == repr(surgery)
    assert gs.from_config(yaml.safe_load(yaml.safe_dump(config)), own_code=True) == surgery
    assert gs.from_config(OmegaConf.create(config), own_code=True).to_config() == config


@pytest.mark.parametrize("site", [None, *SITES])
def test_each_transform_that_acts_at_a_site_is_made_again(site: Selector | None) -> None:
    pairs = (
        [(each, site) for each in TRANSFORMS]
        if site
        else zip(AGGREGATORS, SHARED * 99, strict=False)
    )
    made = []
    for transform, at in pairs:
        try:
            made.append(gs.Intervention(transform, at))
        except ValueError:  # it needs another site
            continue
    assert made
    surgery = gs.Surgery(*made)
    assert gs.from_config(json.loads(json.dumps(surgery.to_config()))) == surgery


def test_code_of_your_own_is_written_by_its_path_and_needs_own_code() -> None:
    steps = (halve, partial(times, factor=0.1), Shrink(0.25), torch.sign, gs.NormMatched(halve))
    surgery = gs.Surgery(gs.Intervention(gs.Chain(*steps)))
    config = surgery.to_config()
    links = config["interventions"][0]["transform"]["links"]
    assert [link["_target_"] for link in links] == [
        f"{__name__}.halve",
        f"{__name__}.times",
        f"{__name__}.Shrink",
        "torch.sign",
        "gradsurg.NormMatched",
    ]
    assert links[1]["factor"] == 0.1
    assert gs.from_config(config, own_code=True) == surgery
    with pytest.raises(ValueError, match="halve is imported and called only with own_code=True"):
        gs.from_config(config)


def first(place: Place) -> bool:
    return place.call == 0


def test_a_class_of_the_main_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shrink, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Shrink", Shrink, raising=False)
    with pytest.raises(TypeError, match="Shrink cannot be imported elsewhere"):
        gs.Surgery(gs.Intervention(Shrink())).to_config()


def test_surgeries_are_equal_if_interventions_and_seed_are() -> None:
    clip = gs.Intervention(gs.Clip(1.0))
    assert gs.Surgery(clip) == gs.Surgery(gs.Intervention(gs.Clip(1.0)))
    assert len({gs.Surgery(clip), gs.Surgery(clip), gs.Surgery(clip, seed=1), gs.Surgery()}) == 3
    assert gs.Surgery(clip, clip) != gs.Surgery(clip)
    assert gs.Surgery() != "Surgery()"
    assert gs.Intervention(halve) == gs.Intervention(halve) != gs.Intervention(abs)


def test_a_config_is_that_of_the_attached_surgery_as_it_is_now(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    surgery = gs.Surgery(gs.Intervention(gs.Clip(1.0)))
    with surgery.attach(model) as live:
        live.set("clip", value=0.5)
        model(torch.ones(1, 2)).sum().backward()
        assert surgery.to_config()["interventions"][0]["transform"]["value"] == 0.5
    assert gs.from_config(surgery.to_config()).interventions[0].transform == gs.Clip(0.5)


def test_a_notebook_shows_a_row_for_each_transform() -> None:
    when, both = ~gs.Steps(3), gs.Outputs(types="<X>") | gs.Outputs(depth=1)
    html = gs.Surgery(
        gs.Intervention(gs.Chain(gs.Clip(0.5), gs.Sign()), both, when),
        gs.Intervention(gs.PCGrad(), gs.SharedParameters()),
        seed=7,
    )._repr_html_()
    rows = html.split("<tr>")[1:]
    assert [row.count("<td>") for row in rows] == [4] * 4
    assert "Clip(value=0.5)" in rows[1]
    assert "types=&#x27;&lt;X&gt;&#x27;" in rows[1]
    assert "pattern" not in rows[1]
    assert rows[2].startswith("<td>Sign()</td>")
    assert "Unless(of=Steps(start=3))</td><td>backward" in rows[2]
    assert "PCGrad()</td><td>SharedParameters()</td><td>Always()</td><td></td>" in rows[3]
    assert "seed 7" in rows[3]


def test_the_digest_tells_interventions_apart_and_not_seeds() -> None:
    def digest(transform: Any, seed: int = 0) -> str:
        return gs.Surgery(gs.Intervention(transform), seed=seed).digest

    assert len(digest(gs.Clip(0.1))) == 8
    assert digest(gs.Clip(0.1), seed=3) == digest(gs.Clip(0.1)) != digest(gs.Clip(0.2))
    assert digest(lambda grad: grad) == ""
