"""Transforms, names, labels and identities of the runs that a config builds."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.experiment import run_identity
from gradsurg.experiment.build import build
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.execution import execute
from gradsurg.experiment.run_identity import run_hash
from gradsurg.transforms.base import Transform
from tests import theirs
from tests.builds import built, config

pytestmark = pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")

GRAD = torch.tensor([3.0, -4.0])


def links(*words: str) -> list[Transform]:
    return [link for part in built(*words).surgery.interventions for link in part.links]


def applied(transform: Transform, grad: Tensor = GRAD) -> list[float]:
    result, _ = transform.update(grad, transform.init(grad), gs.transforms.base.TransformContext())
    return result.tolist()


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (["precision=float16"], ["precision: float16 needs CUDA, "]),
        (
            ["precision=float16", "transform=clip"],
            [
                "precision: float16 needs CUDA, ",
                "site: Clip() depends on the size of the gradient, whi",
            ],
        ),
        (["metric=test/acuracy"], ["metric: did you mean 'test/accuracy'? There is no test/ac"]),
        (["compile=true", "site=nodes"], ["site: Nodes cannot act in a compiled model: "]),
        (["accumulate=40"], ["accumulate: a step's batches must have <= 1347 examples together, "]),
        (["eval_every=7"], ["eval_every: must be a multiple of log_every=50, "]),
        (["schedule=cosine", "schedule.T_max=0"], ["schedule: fails at step 1: "]),
        (["schedule=warmup_cosine", "steps=40"], ["schedule.milestones: must be 1 rising "]),
        (["optimizer=adam", "optimizer.eps=x"], ["optimizer"]),
        (["optimizer=adam", "+optimizer.capturable=true"], ["optimizer: Adam cannot step: "]),
    ],
)
def test_steps_that_cannot_be_made_are_refused_in_a_line_each(
    words: list[str], faults: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        built(*words)
    found = caught.value.faults
    assert [text[: len(start)] for text, start in zip(found, faults, strict=True)] == faults


def test_a_metric_is_checked_also_if_all_runs_have_finished(tmp_path: Path) -> None:
    words = ("steps=1", "log_every=1", "eval_every=1", f"out={tmp_path}", "metric=test/acuracy")
    for run in built(*words[:-1]).runs:
        execute(run, tmp_path, [])
    with pytest.raises(ConfigError, match="There is no test/acuracy"):
        built(*words)


@pytest.mark.parametrize(
    ("words", "expected", "names"),
    [
        ("transform=[clip,scale]", [gs.Clip(0.01), gs.Scale(0.1)], ("clip", "scale")),
        ("transform=[scale,clip]", [gs.Scale(0.1), gs.Clip(0.01)], ("scale", "clip")),
        (
            "transform=[chain,sign] transform.chain.links.0.value=2",
            [gs.Clip(2.0), gs.Scale(0.5), gs.Sign()],
            ("chain.clip", "chain.scale", "sign"),
        ),
        ("transform=chain transform.chain.links=[]", [gs.Chain()], ("chain",)),
        (
            "transform=[clip,tests.theirs.Twice] +transform.twice.factor=7",
            [gs.Clip(0.01), theirs.Twice(7.0)],
            ("clip", "twice"),
        ),
        ("transform=tests.theirs.maker", [gs.Scale(0.25)], ("maker",)),
        (
            "transform=tests.theirs.maker +transform.maker.factor=0.75",
            [gs.Scale(0.75)],
            ("maker",),
        ),
    ],
)
def test_transforms_act_in_order_each_under_a_name_of_its_own(
    words: str, expected: list[Transform], names: tuple[str, ...]
) -> None:
    experiment = built(*words.split())
    (item,) = experiment.surgery.interventions
    assert [*item.links] == expected
    assert experiment.surgery.labels == (names,)


@pytest.mark.parametrize("word", ["transform=[]", "transform=none"])
def test_without_a_transform_there_is_one_plain_run_a_seed(word: str) -> None:
    experiment = built(word, "seeds=3")
    assert experiment.surgery.interventions == ()
    assert [(pair.seed, pair.treated) for pair in experiment.pairs] == [
        (0, None),
        (1, None),
        (2, None),
    ]
    assert {pair.control.label for pair in experiment.pairs if pair.control} == {"none"}


def test_a_users_field_may_be_called_name() -> None:
    (named,) = links("transform=tests.theirs.Named", "+transform.named.name=me")
    assert named.name == "me"


@pytest.mark.parametrize(
    ("words", "result"),
    [
        ("transform=tests.theirs.halve", [1.5, -2.0]),
        ("transform=torch.sign", [1.0, -1.0]),
        ("transform=tests.theirs.scaled +transform.scaled.factor=3", [9.0, -12.0]),
    ],
)
def test_a_plain_callable_acts_on_gradients(words: str, result: list[float]) -> None:
    (function,) = links(*words.split())
    assert applied(function) == result
    assert (
        repr(function).rpartition(".")[2] == words.split()[0].rpartition(".")[2]
    )  # not an address


def test_a_plain_callable_can_stand_inside_another_transform_and_is_part_of_the_identity() -> None:
    words = ("transform=norm_matched", "~transform.norm_matched.of")
    of = "+transform.norm_matched.of={_target_: tests.theirs.halve}"
    (pair,) = built(*words, of).pairs
    assert pair.treated is not None
    (matched,) = pair.treated.surgery.interventions[0].links
    assert applied(matched.of) == [1.5, -2.0]
    assert list(pair.treated.identity["sources"]) == ["tests.theirs.halve"]


def test_a_users_model_and_task_are_used() -> None:
    experiment = built("model=tests.theirs.linear", "+model.bias=false", "transform=clip")
    names = [name for name, _ in experiment.make_model().named_parameters()]
    assert names == ["1.weight"]
    experiment = built("task=tests.theirs.Lines", "transform=clip")
    assert isinstance(experiment.pairs[0].runs[1].task, theirs.Lines)


@pytest.mark.parametrize(("word", "rate"), [("lr=0.5", 0.5), ("lr=null", 3)])
def test_lr_wins_over_the_optimizers_own(word: str, rate: float) -> None:
    run = built("transform=clip", "optimizer.lr=3", word).pairs[0].runs[1]
    assert run.make_optimizer(torch.nn.Linear(1, 1)).param_groups[0]["lr"] == rate


def test_seed_pins_one_seed_and_seeds_counts_from_zero() -> None:
    assert [pair.seed for pair in built("transform=clip", "seed=7", "seeds=3").pairs] == [7]
    assert [pair.seed for pair in built("transform=clip", "seeds=3").pairs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("control", "label"),
    [
        ("none", None),
        ("plain", "none"),
        ("norm_matched", "norm_matched-clip"),
        ("update_norm_matched", "update_norm_matched-clip"),
        ("placebo", "placebo-clip"),
    ],
)
def test_control_names_the_arm_to_compare_with(control: str, label: str | None) -> None:
    (pair,) = built("transform=clip", f"control={control}").pairs
    assert pair.treated is not None
    assert pair.treated.label == "clip"
    assert (pair.control and pair.control.label) == label


@pytest.mark.parametrize("listed", ["plain,norm_matched", "norm_matched,plain"])
def test_a_list_of_controls_trains_a_run_of_each_kind(listed: str) -> None:
    (pair,) = built("transform=clip", f"control=[{listed}]").pairs
    alone = {kind: built("transform=clip", f"control={kind}").pairs[0] for kind in pair.controls}
    assert ",".join(pair.controls) == listed
    assert pair.treated is not None
    assert [run.name for run in pair.runs] == [
        *(one.control.name for one in alone.values() if one.control),
        pair.treated.name,
    ]
    assert {one.treated.name for one in alone.values() if one.treated} == {pair.treated.name}
    names = {kind: run.name for kind, run in pair.controls.items()}
    facts = pair.treated.facts
    assert (facts["controls"], facts["control"]) == (names, names["plain"])
    assert pair.control is pair.controls["plain"]


def test_a_plain_run_has_no_other_control() -> None:
    (pair,) = built("transform=none", "control=[plain,placebo]").pairs
    assert [run.label for run in pair.runs] == ["none"]


@pytest.mark.parametrize(
    ("control", "rule"),
    [
        ("[]", "must be a list of 'plain', 'norm_matched', "),
        ("[none,plain]", "must be a list of 'plain', 'norm_matched', "),
        ("[plain,other]", "must be a list of 'plain', 'norm_matched', "),
        ("[plain,plain]", "must have each kind once"),
        ("other", "must be one of 'none', 'plain', "),
    ],
)
def test_a_wrong_list_of_controls_is_one_line(control: str, rule: str) -> None:
    with pytest.raises(ConfigError) as error:
        built("transform=clip", f"control={control}")
    (line,) = error.value.faults
    assert line.startswith(f"control: {rule}")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("transform=[clip,sign]", "attribute=true"), "attribute: the shorter chains have no "),
        (("site=inputs", "transform=clip"), "control: update_norm_matched needs the gradients"),
    ],
)
def test_each_kind_of_a_list_is_checked(words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        built("control=[plain,update_norm_matched]", *words)
    assert [line[: len(fault)] for line in error.value.faults] == [fault]


def test_building_leaves_no_trace_in_the_random_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    built("transform=[clip,noise]", "site=outputs", "model.dropout=0.5")
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_of_gradsurgs_own_code_is_not_taken_for_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("gradsurg.transforms.zero.Zero.__init__", broken)
    with pytest.raises(ZeroDivisionError):
        build(config("transform=zero"))


# The identity of runs.

OUTSIDE = (
    "out=elsewhere",
    "study=other",
    "log_every=10",
    "log=sites",
    "logger=console",
    "force=true",
    "dry_run=true",
    "threads=2",
    "effects_every=3",
    "checkpoint_every=7",
    "control=none",
    "seeds=4",
    "eval_every=50",
)
INSIDE = (
    "transform=[clip,sign]",
    "transform=[sign,clip]",
    "transform.clip.value=0.5",
    "accumulate=2",
    "precision=bfloat16",
    "compile=true",
    "schedule=cosine",
    "site=outputs",
    "site.pattern=*.weight",
    "when.start=5",
    "seed=1",
    "lr=0.2",
    "steps=30",
    "model.hidden=[8]",
    "batch_size=32",
    "optimizer=adamw",
    "task.label_noise=0.1",
    "model=tests.theirs.linear",
)
BASE = ("transform=clip", "seed=0", "steps=20")


def identity(*words: str) -> str:
    run = built(*BASE, *words).pairs[0].treated
    assert run is not None
    return run_hash(run.identity)


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield identity()


def test_keys_without_effect_on_the_numbers_do_not_change_the_hash(base: str) -> None:
    assert identity(*OUTSIDE) == base


@pytest.mark.parametrize("word", INSIDE)
def test_a_key_that_changes_the_numbers_changes_the_hash(base: str, word: str) -> None:
    assert identity(word) != base
    if word == "transform=[clip,sign]":
        assert identity(word) != identity("transform=[sign,clip]")


@pytest.mark.parametrize(
    ("owner", "name", "version", "is_part"),
    [
        (run_identity, "__version__", "99", True),
        (torch, "__version__", "9.99.0", True),
        (torch, "__version__", f"{'.'.join(torch.__version__.split('.')[:2])}.99+mine", False),
        (numpy, "__version__", "99", False),
    ],
)
def test_gradsurgs_version_and_torchs_line_are_part_of_the_identity(
    base: str, monkeypatch: pytest.MonkeyPatch, owner, name: str, version: str, is_part: bool
) -> None:
    monkeypatch.setattr(owner, name, version)
    assert (identity() != base) == is_part


SOURCE = (
    "from torch import Tensor\n\n\ndef gentle(grad: Tensor) -> Tensor:\n    return grad * 0.5\n"
)


@pytest.mark.parametrize(
    "files",
    [
        {"their_ops": ""},
        {
            "their_ops": "from inner.ops import gentle as _",
            "inner/__init__": "from inner.ops import gentle",
            "inner/ops": SOURCE,
        },
        {"their_ops": "import helper", "helper": "from other import K", "other": "K = 1.0"},
        {"their_ops": "def later():\n    from helper import K", "helper": "K = 1.0"},
        {"their_ops": "import inner.part", "inner/__init__": "", "inner/part": "K = 1.0"},
        {
            "their_ops": "import inner",
            "inner/__init__": "from . import part",
            "inner/part": "K = 1",
        },
        {
            "their_ops": "from inner import K",
            "inner/__init__": "from .part.deep import K",
            "inner/part/__init__": "",
            "inner/part/deep": "from ..other import K",
            "inner/other": "K = 1.0",
        },
    ],
    ids=[
        "itself",
        "re-export",
        "through another",
        "inside a function",
        "dotted",
        "relative",
        "deep",
    ],
)
def test_editing_what_a_users_file_imports_changes_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    path = tmp_path
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import os.path\n{text}\n", encoding="utf-8")
        module = name.removesuffix("/__init__").replace("/", ".")
        monkeypatch.setitem(sys.modules, module, None)  # removed when the test ends
        monkeypatch.delitem(sys.modules, module)
    with (tmp_path / "their_ops.py").open("a", encoding="utf-8") as file:
        file.write(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    word = "transform=their_ops.gentle"
    first = identity(word)
    assert identity(word) == first
    with path.open("a", encoding="utf-8") as file:  # the last one, which has K
        file.write("K = 2.0\n")
    assert identity(word) != first


def test_two_transforms_of_one_study_share_their_control() -> None:
    words = ("transform=clip", "transform=sign", "transform=sign site=outputs")
    first, second, third = (built(*word.split()).pairs[0].runs[0].name for word in words)
    # The control's gradients are measured at the treated sites, so these are two.
    assert first == second != third


@pytest.mark.parametrize("control", ["norm_matched", "update_norm_matched", "placebo"])
def test_a_control_that_acts_is_a_transforms_own(control: str) -> None:
    words = (f"control={control}", "transform=clip", "seed=0")
    values = ("transform.clip.value=0.01", "transform.clip.value=0.02")
    assert len({built(*words, value).pairs[0].runs[0].name for value in values}) == 2


def test_a_config_with_a_missing_part_is_refused() -> None:
    whole = config("transform=clip")
    for key in ("site", "when", "model", "task", "optimizer"):
        part = {name: value for name, value in whole.items() if name != key}
        with pytest.raises(ConfigError, match=f"^{key}: is required"):
            build(part)


def test_each_fault_is_kept_once() -> None:
    error = ConfigError(["lr: wrong", "lr: wrong", "steps: wrong"])
    assert error.faults == ["lr: wrong", "steps: wrong"]
    assert str(error) == "lr: wrong\nsteps: wrong"


@pytest.mark.slow
def test_the_runs_of_ten_thousand_seeds_differ_in_their_seeds() -> None:
    experiment = built("transform=tests.theirs.halve", "seeds=10000", "yes=true", "force=true")
    names = {run.name for run in experiment.runs}
    assert len(names) == 20_000
    first, last = experiment.pairs[0].runs[1], experiment.pairs[-1].runs[1]
    assert last.identity == {**first.identity, "seed": 9999}
    assert last.surgery.seed == 9999
