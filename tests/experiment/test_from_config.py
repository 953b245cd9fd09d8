"""Surgeries of configs: as written in Python, each fault by its key, no code called unasked."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import gradsurg as gs
from gradsurg.experiment.errors import ConfigError
from gradsurg.plugins.registry import CONFIG_DIR

CLIP = {"_target_": "gradsurg.Clip", "value": 0.1}
PARAMETERS = {"_target_": "gradsurg.Parameters"}
RELU = {"_target_": "gradsurg.Outputs", "types": "ReLU"}
PCGRAD = {"_target_": "gradsurg.PCGrad"}
NODE = {"_target_": "gradsurg.Nodes", "pattern": "Addmm", "side": "leave", "edge": 1}
INPUTS = {"_target_": "gradsurg.Inputs"}
UPDATES = {"_target_": "gradsurg.Updates"}
SITES = (PARAMETERS, {**PARAMETERS, "stage": "step"}, NODE, INPUTS, UPDATES)


@pytest.fixture
def composed() -> Iterator[Any]:
    """A function of overrides that composes them like an app without a config."""
    with initialize_config_module("gradsurg.conf", version_base="1.3"):
        yield lambda *words: compose(overrides=[*words])


def surgery_of(text: str, **options: Any) -> gs.Surgery:
    return gs.from_config(yaml.safe_load(text), **options)


def lines_of(config: Any, **options: Any) -> list[str]:
    """The lines of the error of a config."""
    with pytest.raises(ConfigError) as raised:
        gs.from_config(config, **options)
    assert isinstance(raised.value, ValueError)
    return str(raised.value).split("\n")


def as_written(*items: gs.Intervention, seed: int = 0) -> str:
    return repr(gs.Surgery(*items, seed=seed))


# The object that Hydra makes.


def stems(group: str) -> list[str]:
    paths = sorted((CONFIG_DIR / group).glob("*.yaml"))
    return [path.stem for path in paths if path.stem != "none"]


def test_instantiate_makes_each_transform_as_from_config_does(composed: Any) -> None:
    names = stems("transform")
    config = composed(f"+transform=[{','.join(names)}]").transform
    assert sorted(config) == names
    for name, node in config.items():
        made = [surgery for site in SITES for surgery in _made(node, site)]
        assert made, name
        assert instantiate(node) == made[0].interventions[0].transform, name


def _made(node: DictConfig, site: dict[str, Any]) -> Iterator[gs.Surgery]:
    """Yield the surgery of a transform at a site at which it can act."""
    with suppress(ConfigError):
        yield gs.from_config({"transform": node, "site": site})


@pytest.mark.parametrize("group", ["site", "when", "aggregator"])
def test_instantiate_makes_each_option_of_a_group_as_from_config_does(group: str) -> None:
    assert len(stems(group)) > 10
    for name in stems(group):
        node = OmegaConf.load(CONFIG_DIR / group / f"{name}.yaml")
        others = {} if group == "aggregator" else {"transform": {"scale": {**CLIP}}}
        if name == "captured":
            node.pattern = "*"
        (item,) = gs.from_config({**others, group: node}).interventions
        part = {"site": item.at, "when": item.when, "aggregator": item.transform}[group]
        assert instantiate(node) == part, name


def test_a_composed_config_is_the_surgery_that_is_written_in_python(composed: Any) -> None:
    config = composed(
        *("+transform=[clip,noise]", "transform.clip.value=0.2", "+site=outputs"),
        *("site.types=ReLU", "+when=steps", "when.start=500", "+aggregator=pcgrad", "+seed=3"),
    )
    expected = as_written(
        gs.Intervention(
            gs.Chain(gs.Clip(0.2), instantiate(config.transform.noise)),
            at=gs.Outputs(types="ReLU"),
            when=gs.Steps(500),
            names=("clip", "noise"),
        ),
        gs.Intervention(gs.PCGrad(), at=gs.SharedParameters()),
        seed=3,
    )
    assert repr(gs.from_config(config)) == expected
    assert repr(gs.from_config(OmegaConf.to_container(config))) == expected
    assert repr(gs.load(config)) == expected


def test_a_config_needs_no_more_than_a_transform(composed: Any) -> None:
    expected = as_written(gs.Intervention(gs.Clip(0.01)))
    assert repr(gs.from_config(composed("+transform=clip"))) == expected
    (shape, *_) = lines_of(composed("+transform=clip").transform)
    assert shape.startswith("config: has no transform, no aggregator and no interventions; found")


def test_interpolations_are_those_of_the_whole_config() -> None:
    whole = OmegaConf.create({"bound": 0.3, "surgery": {"transform": {"clip": {**CLIP}}}})
    whole.surgery.transform.clip.value = "${bound}"
    expected = as_written(gs.Intervention(gs.Clip(0.3)))
    assert repr(gs.from_config(whole.surgery)) == expected
    assert repr(gs.from_config({"transform": whole.surgery.transform})) == expected


NESTED = """
transform:
  matched: {_target_: gradsurg.NormMatched, of: {_target_: gradsurg.Clip, value: 0.5}}
  chain:
    _target_: gradsurg.Chain
    links:
    - {_target_: gradsurg.Scale, factor: 2}
    - _target_: gradsurg.Scheduled
      of: {_target_: gradsurg.Graft, direction: {_target_: gradsurg.Sign}}
when:
  _target_: gradsurg.AllOf
  of:
  - {_target_: gradsurg.Steps, start: 3}
  - {_target_: gradsurg.Unless, of: {_target_: gradsurg.Flag, flag: f}}
"""


def test_plugins_inside_plugins_are_made() -> None:
    chain = gs.Chain(
        gs.NormMatched(gs.Clip(0.5)), gs.Scale(2.0), gs.Scheduled(gs.Graft(direction=gs.Sign()))
    )
    names = ("matched", "chain.scale", "chain.scheduled")
    when = gs.Steps(3) & ~gs.Flag("f")
    assert repr(surgery_of(NESTED)) == as_written(gs.Intervention(chain, when=when, names=names))
    inner = "{_target_: gradsurg.PerSample, of: {_target_: gradsurg.TrimmedMean, beta: 0.3}}"
    expected = as_written(gs.Intervention(gs.PerSample(gs.TrimmedMean(0.3)), names=("p",)))
    assert repr(surgery_of(f"transform: {{p: {inner}}}")) == expected
    site = gs.Nodes("Relu") | gs.Nodes("Gelu")
    parts = [{"_target_": "gradsurg.Nodes", "pattern": name} for name in ("Relu", "Gelu")]
    node = {"_target_": "gradsurg.Combined", "of": parts}
    assert gs.from_config({"transform": CLIP, "site": node}).interventions[0].at == site


# Several interventions.


def test_a_list_has_interventions_as_composed_or_with_one_transform() -> None:
    config = [
        {"transform": CLIP},
        {"transform": {"a": CLIP, "b": CLIP}, "site": RELU, "when": {"_target_": "gradsurg.Steps"}},
        {"transform": {"_target_": "gradsurg.Chain", "links": [CLIP, CLIP]}, "names": ["x", "y"]},
        {"aggregator": PCGRAD, "shared": {"granularity": "layer"}},
    ]
    both = gs.Chain(gs.Clip(0.1), gs.Clip(0.1))
    expected = as_written(
        gs.Intervention(gs.Clip(0.1)),
        gs.Intervention(both, at=gs.Outputs(types="ReLU"), when=gs.Steps(), names=("a", "b")),
        gs.Intervention(both, names=("x", "y")),
        gs.Intervention(gs.PCGrad(), at=gs.SharedParameters(granularity="layer")),
    )
    assert repr(gs.from_config(config)) == expected
    assert repr(gs.from_config({"interventions": config})) == expected
    assert repr(gs.from_config(OmegaConf.create(config))) == expected


def test_a_mapping_names_its_interventions_which_share_what_stands_beside_it() -> None:
    steps = {"_target_": "gradsurg.Steps", "start": 3}
    config = {
        "interventions": {
            "one": {"transform": CLIP},
            "two": {"transform": {"a": CLIP, "b": CLIP}, "site": PARAMETERS},
            "three": {"aggregator": PCGRAD, "when": {"_target_": "gradsurg.Always"}},
        },
        "site": RELU,
        "when": steps,
        "shared": {"granularity": "layer"},
    }
    both = gs.Chain(gs.Clip(0.1), gs.Clip(0.1))
    assert repr(gs.from_config(config)) == as_written(
        gs.Intervention(gs.Clip(0.1), gs.Outputs(types="ReLU"), gs.Steps(3), names=("one",)),
        gs.Intervention(both, when=gs.Steps(3), names=("two.a", "two.b")),
        gs.Intervention(gs.PCGrad(), at=gs.SharedParameters(granularity="layer"), names=("three",)),
    )


@pytest.mark.parametrize(
    "config", [{"transform": {}}, {"transform": None}, {"aggregator": {}}, {"interventions": {}}]
)
def test_a_group_that_chooses_nothing_is_a_surgery_without_interventions(config: Any) -> None:
    assert repr(gs.from_config(config)) == as_written()


def test_the_seed_of_the_config_comes_first() -> None:
    assert gs.from_config({"transform": CLIP}, 7).seed == 7
    assert gs.from_config({"transform": CLIP, "seed": None}, seed=7).seed == 7
    assert gs.from_config({"transform": CLIP, "seed": 0}, seed=7).seed == 0


@pytest.mark.parametrize("seed", [-1, "3", 1.5, True, False, ""])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    expected = [f"seed: must be a whole number >= 0, found {seed!r}"]
    assert lines_of({"transform": CLIP, "seed": seed}) == expected
    assert lines_of({"transform": CLIP}, seed=seed) == expected


def test_keys_without_an_effect_warn() -> None:
    with pytest.warns(gs.SurgeryWarning, match="^site: has no effect without a transform"):
        gs.from_config({"aggregator": PCGRAD, "site": RELU})
    with pytest.warns(gs.SurgeryWarning, match="^shared: has no effect without an aggregator"):
        gs.from_config({"transform": CLIP, "shared": {"granularity": "layer"}})


# Faults.

MANY = """
wehn: 1
transform:
  clip: {_target_: gradsurg.Clip, vlaue: 1, b: 2}
  nm: {_target_: gradsurg.NormMatched, of: {_target_: gradsurg.Clip, value: -1}}
  c: {_target_: gradsurg.Chain, links: [{_target_: gradsurg.Scale}, {_target_: gradsurg.Scael}]}
  d: {_target_: gradsurg.Chain, links: [{_target_: gradsurg.Scale, factor: null}]}
site: {_target_: gradsurg.Parameters, patern: x}
when: {_target_: nope.Nope}
seed: x
"""


def test_all_faults_are_told_by_their_keys_in_one_error() -> None:
    lines = lines_of(yaml.safe_load(MANY), own_code=True)
    begins = [
        "wehn: did you mean 'when'? A surgery has no key 'wehn'.",
        "transform.clip.vlaue: did you mean 'value'? There is no field 'vlaue'.",
        "transform.clip.b: there is no field 'b'. There are: value.",
        "transform.nm.of.value: must be > 0, such as 0.01, found -1",
        "transform.c.links.1: did you mean 'gradsurg.Scale'? There is no 'gradsurg.Scael'.",
        "transform.d.links.0.factor: must be a number, found None",
        "site.patern: did you mean 'pattern'? There is no field 'patern'. There are: pattern, ",
        "when: there is no module 'nope' on the path, or in this folder",
        "seed: must be a whole number >= 0, found 'x'",
    ]
    assert len(lines) == len(begins)
    for line, begin in zip(lines, begins, strict=True):
        assert line.startswith(begin)
    (line,) = lines_of({"transform": {"q": {"_target_": "gradsurg.Zzzzzzzzzz"}}})
    assert "There are: gradsurg.AdaptiveClip, " in line  # classes of the kind alone


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("transform: clip", "transform: must be a mapping, found the text 'clip': add hydra: {sea"),
        ("transform: [clip]", "transform: must be a mapping, found ['clip']"),
        ("{transform: {}, site: parameters}", "site: must be a mapping, found the text 'parameter"),
        (
            "transform: {c: clip}",
            "transform.c: must be a mapping with a _target_, which i",
        ),
        ("transform: {c: {value: 1}}", "transform.c: needs a _target_, which is gradsurg.Clip"),
        (
            "transform: {c: }",
            "transform.c: must be a mapping with a _target_, which is grads",
        ),
        ("{transform: {}, model: {}}", "model: a surgery has no key 'model'. There are: transform"),
        ("site: {}", "config: has no transform, no aggregator and no interventions; found {'site'"),
        ("{}", "config: has no transform, no aggregator and no interventions; found {}"),
        ("[]", "config: has no transform, no aggregator and no interventions; found {}"),
        ("clip", "config: must be a mapping, found 'clip'"),
        ("", "config: must be a mapping, found None"),
        (
            "interventions: 3",
            "interventions: must be a list, or map names to interventions, found 3",
        ),
        ("[3]", "interventions.0: must be a mapping, found 3"),
        (
            "[{transform: clip}]",
            "interventions.0.transform: must be a mapping, found the text 'cli",
        ),
        ("[{transform: {}, sote: 1}]", "interventions.0.sote: did you mean 'site'? "),
        ("interventions: {a: {site: }}", "interventions.a: has no transform, no aggregator and no"),
        (
            "[{transform: {}, names: a}]",
            "interventions.0.names: must be a list of names, found 'a'",
        ),
        (
            "[{transform: {_target_: gradsurg.Sign}, names: [a, b]}]",
            "interventions.0.names: names: ",
        ),
        (
            "interventions: {a: {transform: {_target_: gradsurg.Clip, value: -1}}}",
            "interventions.a.transform.value: must be > 0, such as 0.01, found -1",
        ),
        (
            "transform: {c: {_target_: gradsurg.Clip, value: true}}",
            "transform.c.value: must be a n",
        ),
        (
            "transform: {c: {_target_: gradsurg.Clip, value: '???'}}",
            "transform.c.value: is required",
        ),
        (
            "transform: {c: {_target_: gradsurg.Clip, value: '${x}'}}",
            "transform.c.value: must be resolved first, found the interpolation '${x}'",
        ),
        (
            "transform: {c: {_target_: gradsurg.Clip, _partial_: true}}",
            "transform.c: _partial_: is for functions of your own",
        ),
        (
            "transform: {x: {_target_: gradsurg.PCGrad}}",
            "transform.x: must be a Transform, found P",
        ),
        (
            "transform: {x: {_target_: gradsurg.Chain, links: [{_target_: gradsurg.PCGrad}]}}",
            "transform.x: Chain.links.0: must be a transform, found PCGrad(",
        ),
        (
            "aggregator: {_target_: gradsurg.Clip}",
            "aggregator: must be an Aggregator, found the cl",
        ),
        (
            "{transform: {}, when: {_target_: gradsurg.Parameters}}",
            "when: must be a Trigger, found the class Parameters",
        ),
        (
            "{transform: {}, site: {_target_: gradsurg.Parameters, stage: forward}}",
            "site.stage: Parameters cannot have stage 'forward'; stages it can have: backward",
        ),
        (
            "{aggregator: {_target_: gradsurg.PCGrad}, shared: {granularty: layer}}",
            "shared.granularty: did you mean 'granularity'? There is no field",
        ),
        (
            "{transform: {}, when: {_target_: gradsurg.AllOf, of: [{_target_: gradsurg.Evry}]}}",
            "when.of.0: did you mean 'gradsurg.Every'? There is no 'gradsurg.Evry'.",
        ),
    ],
)
def test_a_wrong_config_is_refused_by_its_key(text: str, expected: str) -> None:
    (line,) = lines_of(yaml.safe_load(text))
    assert line.startswith(expected)


def test_an_interpolation_that_cannot_be_resolved_is_told_by_its_key() -> None:
    config = OmegaConf.create({"transform": {"clip": {**CLIP, "value": "${nope}"}}})
    assert lines_of(config) == ["transform.clip.value: Interpolation key 'nope' not found"]


# Trust.


@pytest.mark.parametrize(
    "target",
    [
        "os.getcwd",
        "torch.load",
        "torch.optim.SGD",
        "torch.optim.lr_scheduler.partial",
        "hydra.utils.get_object",
        "gradsurg.load_study",
        "gradsurg.load",
        "gradsurg.from_config",
        "gradsurg.Surgery",
        "gradsurg.sequence",
        "gradsurg.experiments.config_dirs",
        "gradsurg.loggers.wandb.Wandb",
        "gradsurg.tasks.digits.Digits",
        "gradsurg.models.mlp.MLP",
        "gradsurg.transforms.clip.validated",
    ],
)
def test_nothing_but_plugins_of_a_surgery_is_called_unasked(target: str) -> None:
    node = {"_target_": target}
    nested = {"_target_": "gradsurg.Chain", "links": [CLIP, node]}
    rule = f"{target} is imported and called only with own_code=True"
    assert lines_of({"transform": {"x": node}}) == [f"transform.x: {rule}"]
    assert lines_of({"transform": node}) == [f"transform: {rule}"]
    assert lines_of({"transform": {"x": nested}}) == [f"transform.x.links.1: {rule}"]
    assert lines_of({"transform": {}, "site": node}) == [f"site: {rule}"]
    assert lines_of([{"transform": CLIP, "when": node}]) == [f"interventions.0.when: {rule}"]
    assert lines_of({"aggregator": PCGRAD, "shared": node}) == [f"shared: {rule}"]


@pytest.mark.parametrize("escape", ["", "\\"])
def test_no_interpolation_hides_code(escape: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    hidden = f"{escape}${{oc.decode:'{{_target_: os.mkdir, path: {touched}}}'}}"
    config = {"transform": {"x": {"_target_": "gradsurg.NormMatched", "of": hidden}}}
    assert "transform.x.of" in lines_of(config)[0]
    assert "transform.x" in lines_of(OmegaConf.create(config))[0]
    assert not touched.exists()


CODE = """
from gradsurg.transforms import Stateless, validated

def halve(grad):
    return grad * 0.5

def times(grad, factor):
    return grad * factor

@validated
class Shrink(Stateless):
    factor: float = 0.5
    def apply(self, grad, context):
        return grad * self.factor
"""


def test_code_of_your_own_is_called_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from_config_code.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    nodes = {
        "a": {"_target_": "from_config_code.halve"},
        "b": {"_target_": "from_config_code.times", "factor": 0.1},
        "c": {"_target_": "from_config_code.Shrink", "factor": 0.25},
    }
    surgery = gs.from_config({"transform": nodes}, own_code=True)
    text = "Chain(halve, times, Shrink(factor=0.25))"
    assert repr(surgery.interventions[0].transform) == text
    assert surgery.labels == (("a", "b", "c"),)
    wrong = {"transform": {"c": {"_target_": "from_config_code.Shrink", "fator": 1}}}
    (line,) = lines_of(wrong, own_code=True)
    assert line.startswith("transform.c.fator: did you mean 'factor'? There is no field 'fator'.")


def test_an_error_of_your_own_class_is_the_one_that_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def make():\n    raise ValueError('too thin') from KeyError('width')\n"
    (tmp_path / "raising.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    node = {"transform": {"_target_": "raising.make"}}
    with pytest.raises(ValueError, match=r"raising\.make raised ValueError: too thin"):
        gs.from_config(node, own_code=True)
