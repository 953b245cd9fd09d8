"""Recipes: a surgery as a file that the library and the command line share; some with oracles."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.experiment.compose import GROUPS, compose_config
from gradsurg.experiment.recipes import recipes
from gradsurg.models.resnet import ResNet
from gradsurg.models.vit import ViT
from tests.conftest import Here

STEP = gs.Parameters(stage="step")
IMAGES = torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ATTENTION = "ScaledDotProduct*"
SHIPPED = {
    "deconvnet": (gs.Deconvolve(), gs.Nodes("rectifier", side="leave")),
    "dgc": (gs.Chain(gs.ClipNorm(1.0), gs.DGC()), STEP),
    "dp_sgd": (gs.PerSample(gs.ClipGlobalNorm(1.0), noise=1.0), gs.Parameters()),
    "ef_signsgd": (gs.ErrorFeedback(gs.Sign(scale="mean")), STEP),
    "feedback_alignment": (
        gs.FeedbackWeights(),
        gs.Nodes("Addmm", module=r"re:(?!hidden\.0\.|0$).*", side="leave", edge=1),
    ),
    "linbp": (
        gs.StraightThrough(rescale=True),
        gs.Nodes("rectifier", module=r"re:(stages\.[12]|layer[34])\..*", side="leave"),
    ),
    "pna": (
        gs.Zero(),
        gs.Nodes(ATTENTION, side="leave", edge=0) | gs.Nodes(ATTENTION, side="leave", edge=1),
    ),
    "sgm": (gs.Scale(0.5), gs.Nodes("Add", side="leave", edge="residual")),
    "tgr": (gs.TGR(), gs.Inputs("*.mlp")),
}
"""The transform and the site of each; those without an oracle below have one as a transform."""
PRESETS = {
    "agc": (gs.AGC(), STEP),
    "autoclip": (gs.AdaptiveClip("quantile", z=0.1, max_norm=None), STEP),
    "cagrad": (gs.CAGrad(), gs.SharedParameters()),
    "centralize": (gs.Centralize(), STEP),
    "clip": (gs.Clip(0.01), gs.Parameters()),
    "clip_global_norm": (gs.ClipGlobalNorm(1.0), STEP),
    "clip_norm": (gs.ClipNorm(1.0), gs.Parameters()),
    "gradient_noise": (gs.AddNoise(), STEP),
    "gradient_reversal": (gs.GradientReversal(), gs.Inputs("heads.1")),
    "grokfast": (gs.GrokfastEMA(), STEP),
    "guided_backprop": (gs.ScaleBySign(1.0, 0.0), gs.Nodes("rectifier")),
    "pcgrad": (gs.PCGrad(), gs.SharedParameters()),
    "zclip": (gs.AdaptiveClip("zscore"), STEP),
}
"""The same of those for the configs of other apps."""
SEVERAL = {
    "attnlrp": {
        "norm": (gs.Zero(), gs.Nodes("Rsqrt", types="*RMSNorm", side="leave")),
        "activation": (gs.LRP("identity", epsilon=1e-10), gs.Inputs("*.act_fn")),
        "gate": (gs.Scale(0.5), gs.Inputs("*.down_proj")),
        "queries_keys": (gs.Scale(0.25), gs.Outputs(r"re:.*\.[qk]_proj")),
        "values": (gs.Scale(0.5), gs.Outputs("*.v_proj")),
    },
}
"""The same of those with several interventions, by their names."""


def test_the_shipped_recipes_are_surgeries_as_written_in_python() -> None:
    assert recipes() == sorted([*SHIPPED, *SEVERAL, *PRESETS])
    assert {entry.name for entry in gs.list("recipe")} >= {*SHIPPED}
    for name, (transform, site) in SHIPPED.items():
        names = ("dp_sgd",) if name == "dp_sgd" else ()
        made = gs.Surgery(gs.Intervention(transform, at=site, names=names))
        assert repr(gs.load(name)) == repr(made)
    for name, (act, at) in PRESETS.items():
        names = (name,) if name in ("autoclip", "zclip") else ()
        made = gs.Surgery(gs.Intervention(act, at=at, names=names))
        assert repr(gs.load(name)) == repr(made)
    for name, named in SEVERAL.items():
        items = [gs.Intervention(act, at=at, names=(key,)) for key, (act, at) in named.items()]
        assert repr(gs.load(name)) == repr(gs.Surgery(*items))


def stored(folder: Path, text: str) -> Path:
    path = folder / "experiment" / "mine.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


MINE = """# @package _global_
defaults:
- override /transform: [clip]
- override /site: outputs
- override /when: null
- override /aggregator: mgda
transform:
  clip: {value: 0.5}
  b.c:
    _target_: gradsurg.ErrorFeedback
    of:
      _target_: gradsurg.Graft
      direction: {_target_: gradsurg.Sign}
      magnitude: {_target_: gradsurg.Zero}
site: {types: ReLU}
when:
  _target_: gradsurg.AnyOf
  of:
  - {_target_: gradsurg.Unless, of: {_target_: gradsurg.Steps, start: 3, stop: 5}}
  - {_target_: gradsurg.Flag, flag: f}
shared: {granularity: ['1e5*', '*']}
seed: 3
"""


def test_a_file_is_loaded_and_read_by_the_command_line(here: Here, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    made = gs.Surgery(
        gs.Intervention(
            gs.Chain(gs.Clip(0.5), gs.ErrorFeedback(gs.Graft(gs.Sign(), gs.Zero()))),
            at=gs.Outputs(types="ReLU"),
            when=~gs.Steps(3, 5) | gs.Flag("f"),
            names=("clip", "b.c"),
        ),
        gs.Intervention(gs.MGDA(), at=gs.SharedParameters(granularity=("1e5*", "*"))),
        seed=3,
    )
    assert repr(gs.load(stored(tmp_path / "own", MINE))) == repr(made)
    stored(tmp_path / "own", "\n".join(line for line in MINE.split("\n") if "mgda" not in line))
    ended = here("--config-dir", "own", "experiment=mine", "dry_run=true")
    assert ended.code == 0, ended.err
    assert "hidden.0.relu#0" in ended.out


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["guided_backrop"], LookupError, r"did you mean 'guided_backprop'. There is no recipe"),
        (["simple_transforms"], ValueError, r"^simple_transforms: is a study, no recipe: it sets "),
        (["missing/one.yaml"], FileNotFoundError, r"missing/one.yaml"),
        (["sgm", "lr=3"], ValueError, r"^sgm: lr=3: is no key of a recipe, which are transform"),
        (["sgm", "site.patern=x"], ValueError, r"^sgm: site.patern: did you mean 'pattern'"),
        (["sgm", "transform.scale.factor=x"], ValueError, r"scale.factor: must be a number, found"),
        (
            ["attnlrp", "interventions.gate.site.patern=x"],
            ValueError,
            r"gate.site.patern: did you mean 'pattern'",
        ),
        (
            ["attnlrp", "interventions.gate=x"],
            ValueError,
            r"interventions.gate: must be a mapping, f",
        ),
        (
            ["attnlrp", "interventions=x"],
            ValueError,
            r"^attnlrp: interventions: must be a list, or map names",
        ),
        (["sgm", "seed=x"], ValueError, r"^sgm: seed: must be a whole number >= 0, found 'x'"),
    ],
)
def test_a_wrong_recipe_is_refused(words: list[str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        gs.load(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]\n", r"must be a mapping that begins with"),
        ("a: [\n", r"is no yaml"),
        ("transform: {}\n", r"that begins with '# @package _global_'"),
        ("# @package _global_\nseed: 3\n", r"sets no transform, site or aggregator"),
        ("# @package _global_\nsite: {patern: x}\n", r"patern"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        gs.load(stored(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("transform: {x: {_target_: code.write, path: called}}", "transform.x"),
        (
            "transform: {x: {_target_: gradsurg.Graft, direction: {_target_: code.write}}}",
            "x.direction",
        ),
        (
            "when: {_target_: gradsurg.AnyOf, of: [{_target_: code.write, path: called}]}",
            "when.of.0",
        ),
        ("defaults: [override /site: code.write]\nsite: {path: called}", "site"),
    ],
)
def test_code_that_a_recipe_names_is_neither_called_nor_imported_unasked(
    text: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "open('imported', 'w')\ndef write(path):\n    open(path, 'w')\n"
    (tmp_path / "recipe_code.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = text.replace("code.write", "recipe_code.write")
    path = stored(tmp_path, f"# @package _global_\n{text}\n")
    with pytest.raises(ValueError, match=rf"{place}: recipe_code\.write is imported and"):
        gs.load(path)
    with pytest.raises(ValueError, match=r"x\.typo"):
        gs.load(path, "transform.x.typo=1")
    assert not {"imported", "called"} & {file.name for file in tmp_path.iterdir()}


def test_a_class_of_another_kind_is_not_called(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    part = f"{{_target_: subprocess.Popen, args: [touch, {touched}]}}"
    path = stored(tmp_path, f"# @package _global_\ntransform: {{x: {part}}}\n")
    with pytest.raises(ValueError, match="must be a Transform, found the class Popen"):
        gs.load(path, own_code=True)
    assert not touched.exists()


def test_overrides_change_a_recipe() -> None:
    surgery = gs.load("sgm", "transform.scale.factor=0.2", "site.edge=1", "seed=4")
    (item,) = surgery.interventions
    assert item.transform == gs.Scale(0.2)
    assert item.at == gs.Nodes("Add", side="leave", edge=1)
    assert surgery.seed == 4


# Oracles.


def gradients(model: nn.Module, surgery: gs.Surgery | None = None) -> list[Tensor]:
    """The gradients of the input and of the parameters that have one."""
    inputs = IMAGES.clone().requires_grad_()
    with surgery.attach(model, effects_every=0) if surgery else nullcontext():
        model(inputs).sin().sum().backward()
    grads = [leaf.grad for leaf in (inputs, *model.parameters())]
    model.zero_grad()
    return [grad for grad in grads if grad is not None]


def assert_as(result: list[Tensor], expected: list[Tensor], plain: list[Tensor]) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
    assert not all(torch.allclose(*pair) for pair in zip(result, plain, strict=True))


class Decayed(nn.Module):
    """The same value, and 0.3 of the gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        branch = self.module(x)
        return 0.3 * branch + 0.7 * branch.detach()


def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet((1, 8, 8), 3, width=4).double()


def test_linbp_acts_at_the_relus_of_the_later_stages() -> None:
    model = resnet()
    with gs.load("linbp").attach(model) as live:
        model(IMAGES).sum().backward()
    assert {entry.site[:8] for entry in live.ledger} == {"stages.1", "stages.2"}


def test_sgm_decays_the_gradient_through_each_residual_branch() -> None:
    model = resnet()
    plain = gradients(model)
    result = gradients(model, gs.load("sgm", "transform.scale.factor=0.3"))
    for stage in model.stages.children():
        for block in stage.children():
            block.norm2 = Decayed(block.norm2)
    assert_as(result, gradients(model), plain)


def test_sgm_decays_the_branch_of_either_operand() -> None:
    torch.manual_seed(0)
    model = ViT((1, 8, 8), 3, width=8, num_heads=2).double()
    plain = gradients(model)
    with gs.load("sgm", "transform.scale.factor=0.3").attach(model) as live:
        model(IMAGES).sum().backward()
        sites = [entry.site for entry in live.ledger if entry.fired]
    model.zero_grad()
    blocks = [*model.blocks]
    assert len(sites) == 2 * len(blocks)  # and none at the sum with the positions
    result = gradients(model, gs.load("sgm", "transform.scale.factor=0.3"))
    for block in blocks:
        block.attention, block.mlp = Decayed(block.attention), Decayed(block.mlp)
    assert_as(result, gradients(model), plain)


def test_guided_backprop_acts_at_relu6_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU6(), nn.Linear(8, 4), nn.ReLU())
    with gs.load("guided_backprop").attach(model.double()) as live:
        model(IMAGES).sum().backward()
    assert [entry.fired for entry in live.ledger] == [1, 1]


def test_pna_is_attention_with_a_constant_attention_map(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = ViT((1, 8, 8), 3, width=8, num_heads=2).double()
    plain, result = gradients(model), gradients(model, gs.load("pna"))

    def constant_map(queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool) -> Tensor:
        scores = queries @ keys.mT / queries.shape[-1] ** 0.5
        return scores.softmax(-1).detach() @ values

    monkeypatch.setattr("gradsurg.models._transformer.scaled_dot_product_attention", constant_map)
    assert_as(result, gradients(model), plain)


def test_dgc_sends_the_largest_entries_and_keeps_the_others_with_their_momentum() -> None:
    model = nn.Linear(6, 4, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    u = v = torch.zeros(4, 6).double()
    torch.manual_seed(0)
    with gs.load("dgc", "transform.dgc.amount=0.25").attach(model, optimizer, effects_every=0):
        for seed in range(6):
            grad = torch.randn(
                4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            )
            u = 0.9 * u + grad * min(1.0, 1.0 / grad.norm().item())
            v = v + u
            mask = v.abs() >= v.abs().flatten().topk(6).values[-1]
            model.weight.grad, before = grad.clone(), model.weight.detach().clone()
            optimizer.step()
            result = before - model.weight.detach()
            torch.testing.assert_close(result, v * mask, rtol=1e-12, atol=1e-12)
            u, v = u * ~mask, v * ~mask


def test_the_command_line_refuses_a_recipe_of_several_interventions(here: Here) -> None:
    ended = here("experiment=attnlrp")
    assert ended.code == 2
    assert ended.err.startswith("interventions: are for gs.load(..) in Python")


def test_another_app_takes_a_preset_and_changes_its_groups() -> None:
    with initialize_config_module("gradsurg.conf", version_base="1.3"):
        for name in PRESETS:
            config = compose(overrides=[f"+surgery={name}"]).surgery
            assert repr(gs.from_config(config)) == repr(gs.load(name))
            elsewhere = compose(overrides=[f"+surgery@treatment.first={name}"]).treatment.first
            assert elsewhere == config
        words = ("transform@surgery.transform=[clip,sign]", "surgery.transform.clip.value=0.5")
        words += ("site@surgery.site=outputs", "when@surgery.when=flag")
        changed = compose(overrides=["+surgery=clip", *words]).surgery
    (item,) = gs.from_config(changed).interventions
    assert (item.transform, item.at) == (gs.Chain(gs.Clip(0.5), gs.Sign()), gs.Outputs())
    assert isinstance(item.when, gs.Flag)


def test_a_preset_is_changed_as_a_recipe_is() -> None:
    words = ("transform=[clip,sign]", "transform.clip.value=0.5", "site.pattern=*.bias", "seed=4")
    surgery = gs.load("grokfast", *words)
    made = gs.Intervention(gs.Chain(gs.Clip(0.5), gs.Sign()), gs.Parameters("*.bias", stage="step"))
    assert repr(surgery) == repr(gs.Surgery(made, seed=4))
    with pytest.raises(ValueError, match=r"^grokfast: site.patern: did you mean 'pattern'"):
        gs.load("grokfast", "site.patern=x")
    with pytest.raises(ValueError, match="^grokfast: lr=3: is no key of a recipe"):
        gs.load("grokfast", "lr=3")


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("+surgery=clip", "transform=clip"),
        ("surgery=guided_backprop", "transform=scale_by_sign site=nodes site.pattern=rectifier"),
        ("++surgery=grokfast", "transform=grokfast_ema site.stage=step"),
        ("+surgery=pcgrad", "aggregator=pcgrad"),
        ("+surgery@treatment=unknown", "transform=clip"),
        ("surgery.transform.clip.value=1", "transform=clip"),
    ],
)
def test_the_command_line_names_the_words_that_stand_for_a_preset(
    word: str, instead: str, here: Here
) -> None:
    ended = here(word, "steps=0")
    assert (ended.code, ended.out) == (2, "")
    rule = "is a group for the configs of your own app; here write"
    assert ended.err == f"{word.partition('=')[0].lstrip('+')}: {rule} {instead}\n"
    if "unknown" not in word and "value" not in word:
        assert repr(gs.load(word.rpartition("=")[2])) == repr(_loaded(instead))


def _loaded(words: str) -> gs.Surgery:
    """The surgery of words of the command line."""
    config = compose_config(*words.split())
    return gs.from_config({key: config[key] for key in GROUPS[:4] if key != "when"})


def test_presets_are_listed_and_are_no_group_of_the_command_line(here: Here) -> None:
    assert {entry.name for entry in gs.list("surgery")} == {*PRESETS}
    assert "+surgery=clip" in gs.list("surgery")[4].command
    groups = [line.partition(":")[0] for line in here("--help").out.splitlines()]
    assert {"transform", "experiment", "logger"} <= {*groups}
    assert not {"surgery", "hydra"} & {*groups}


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_the_command_of_a_recipe_trains(name: str, here: Here) -> None:
    entry = next(entry for entry in gs.list("recipe") if entry.name == name)
    words = entry.command.split()[3:]
    ended = here(*words, "steps=2", "seeds=1", "logger=none", "report=false")
    assert ended.code == 0, ended.err
