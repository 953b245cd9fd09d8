"""The commands and snippets of the pages in docs/ run as they stand."""

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.plugins.registry import names
from gradsurg.transforms import GroupTransform
from tests.conftest import Here
from tests.forks import Ranks, in_ranks
from tests.page_setups import gradients, plain
from tests.test_readme import ROOT, blocks

PAGE = "docs/own_code.md"
SHORT = ("steps=3", "seeds=1", "logger=none", "report=false")


def commands(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("python -m gradsurg.run ")]


COMMANDS = commands(PAGE)
TIMM = [line for line in COMMANDS if "timm" in line]
ELSEWHERE = [line for line in COMMANDS if "columns" in line]  # tests/test_contributing.py runs it


@pytest.fixture
def own(here: Here, folder: Path) -> Here:
    """The command in a folder with the page's mine.py."""
    (folder / "mine.py").write_text(blocks("python", PAGE)[0], encoding="utf-8")
    return here


@pytest.mark.parametrize("line", [line for line in COMMANDS if line not in [*TIMM, *ELSEWHERE]])
def test_a_command_with_ones_own_code_trains(own: Here, line: str) -> None:
    ended = own(*shlex.split(line)[3:], *SHORT)
    assert ended.code == 0, ended.err
    assert "mine" not in line or not ended.err


def test_the_model_of_another_package_is_one_line(own: Here) -> None:
    pytest.importorskip("timm", reason="the extra `oracles` has timm")
    (line,) = TIMM
    assert own(*shlex.split(line)[3:], "steps=1", *SHORT[1:]).code == 0


def test_the_yaml_files_are_options(own: Here, folder: Path) -> None:
    (option,) = blocks("yaml", PAGE)
    experiment = blocks("yaml", "docs/reproduce.md")[0]
    for kind, name, text in (("transform", "soft", option), ("experiment", "all", experiment)):
        (folder / "confs" / kind).mkdir(parents=True)
        (folder / "confs" / kind / f"{name}.yaml").write_text(text, encoding="utf-8")
    words = shlex.split(option.splitlines()[0])[4:]
    assert own(*words, *SHORT).code == 0
    assert own("--config-dir", "confs", "experiment=all", *SHORT).code == 0


def test_the_transform_that_reads_the_value_is_weight_decay() -> None:
    names: dict[str, Any] = {}  # Any: what the page defines
    exec(blocks("python", PAGE)[0], names)
    model = nn.Linear(3, 2)
    with gs.Surgery(gs.Intervention(names["Decay"](0.5), gs.Parameters())).attach(model):
        model(torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(model.weight.grad, 1 + 0.5 * model.weight.detach())


def test_the_group_transform_trains() -> None:
    names: dict[str, type[GroupTransform]] = {}
    exec(blocks("python", PAGE)[1], names)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    at = gs.Parameters(stage="step")
    before = [param.detach().clone() for param in model.parameters()]
    with gs.Surgery(gs.Intervention(names["LargestToOne"](), at=at)).attach(model, optimizer):
        model(torch.ones(3)).square().sum().backward()
        optimizer.step()
    steps = [(old - new).abs().max() for old, new in zip(before, model.parameters(), strict=True)]
    assert max(steps).item() == pytest.approx(1.0)


def test_a_trigger_and_an_aggregator_of_ones_own_act_and_are_read_from_a_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine: Any = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    exec(blocks("python", PAGE)[0], vars(mine))
    surgery = gs.Surgery(
        gs.Intervention(gs.Zero(), gs.Parameters(stage="step"), when=mine.Alternate(1)),
        gs.Intervention(mine.Favour(5.0), gs.SharedParameters()),
    )
    assert gs.from_config(surgery.to_config(), own_code=True) == surgery
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    steps = []
    with surgery.attach(model, optimizer) as live:
        for _ in range(4):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            outputs = model(torch.eye(2))
            live.backward({"a": outputs[0].sum(), "b": outputs[1].sum()})
            optimizer.step()
            steps.append((before - model.weight.detach()).flatten().tolist())
    assert steps == [pytest.approx([5.0, 1.0]), [0.0, 0.0]] * 2


def test_the_results_are_data_frames(own: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own("transform=clip", *SHORT).code == 0
    names: dict[str, object] = {"gs": gs}
    exec(blocks("python", PAGE)[-1], names)
    runs = vars(names["study"])["runs"]
    assert isinstance(runs, pl.DataFrame)
    assert sorted(runs["arm"]) == ["clip", "control"]


def test_the_trigger_of_the_concepts_is_the_one_of_its_command(here: Here) -> None:
    text = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(python -m gradsurg.run transform.*?)`", text)
    ended = here(*shlex.split(line)[3:], "dry_run=true", "logger=none")
    assert ended.code == 0, ended.err


def test_the_trigger_in_the_file_of_the_concepts_is_the_one_in_its_python_block(
    here: Here, folder: Path
) -> None:
    (text,) = blocks("yaml", "docs/concepts.md")
    (folder / "confs/when").mkdir(parents=True)
    (folder / "confs/when/late.yaml").write_text(text, encoding="utf-8")
    words = shlex.split(text.splitlines()[0])[4:]
    ended = here(*words, "dry_run=true", "logger=none")
    assert ended.code == 0, ended.err
    last = blocks("python", "docs/concepts.md")[-1].splitlines()[-1]
    assert repr(eval(last, {"gs": gs})) in ended.out


def test_the_comparison_of_ones_own_loop_prints_its_verdict(capsys) -> None:
    (code,) = [block for block in blocks("python", "docs/trainers.md") if "gs.compare" in block]

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, 20)
        return x, x[:, :3].argmax(dim=1)

    def fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(60):
            x, y = batch()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def accuracy(model: nn.Module) -> float:
        x, y = batch()
        return (model(x).argmax(dim=1) == y).double().mean().item()

    clip = gs.Intervention(gs.Clip(0.01), gs.Parameters())
    given = {"make_model": lambda: nn.Linear(20, 3), "fit": fit, "accuracy": accuracy}
    exec(code, {"torch": torch, "gs": gs, "surgery": gs.Surgery(clip), **given})
    assert f"\n> {capsys.readouterr().out}\n" in (ROOT / "docs/trainers.md").read_text("utf-8")


def test_every_page_is_in_a_table_of_contents() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= {word.strip("<>") for word in index.split()}  # "Title <page>" too


def test_the_landing_page_prints_its_table_and_counts_right(capsys) -> None:
    (code,) = blocks("python", "docs/index.md")
    exec(code, {})
    assert capsys.readouterr().out == blocks("text", "docs/index.md")[0]
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    told = re.search(r"more than (\d+) transforms .*? more than (\d+) aggregators", text, re.DOTALL)
    assert told
    for number, kind in zip(told.groups(), ("transforms", "aggregators"), strict=True):
        assert 0 < len(names(kind)) - int(number) < 20


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/how/*.md")])
PAGES += sorted([*ROOT.glob("gradsurg/*/README.md"), *ROOT.glob("experiments/*/README.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_code_is_as_narrow_as_the_site(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [
        line for kind, block in blocks if kind not in ("sh", "text") for line in block.splitlines()
    ]
    assert [line for line in lines if len(line) > 79] == []


def test_the_answers_act() -> None:
    text = (ROOT / "docs/faq.md").read_text("utf-8")
    (captured,) = re.findall(r"`(gs\.Inter.*gs\.Captured\(\)\))`", text)
    (middle,) = blocks("python", "docs/faq.md")
    names = plain()
    names["x"], names["y"] = x, y = names["loader"][0]
    before = gradients(names)
    with gs.Surgery(eval(captured)).attach(model := names["model"]):
        (grad,) = torch.autograd.grad(names["loss_fn"](model(x), y), [model[0].weight])
    torch.testing.assert_close(grad, before[0] / 2)
    names["model"].zero_grad()
    exec(middle, names)
    first, _, last, _ = (param.grad for param in names["model"].parameters())
    assert 0 < first.norm() < before[0].norm() / 10
    assert (first * before[0]).sum() < 0  # reversed
    assert torch.equal(last, before[2])  # above the sites


def test_all_questions_are_answered() -> None:
    text = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
    answers = text.count("\n## ") + len(re.findall(r"^\| .*\?.* \|$", text, re.MULTILINE))
    assert answers == 17


def _in_two_processes(ranks: Ranks, folder: Path) -> list[float]:
    """Run the snippets of a page in turn, each with a new model; return a number of each."""
    results = []
    loop, buckets = blocks("python", "docs/distributed.md")
    for snippet in (loop, buckets + loop):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(ranks.rank))
        names = {
            "gs": gs,
            "net": net,
            "model": DistributedDataParallel(net),
            "DistributedDataParallel": DistributedDataParallel,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "loader": [(x, x[:, 0].long().clamp(0, 2))] * 3,
            "loss_fn": nn.functional.cross_entropy,
            "surgery": gs.Surgery(gs.Intervention(gs.Scale(0.5))),
        }
        exec(snippet, names)
        results.append(float(net.weight.detach().square().sum()))
    return results


@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
def test_the_snippets_for_several_processes_train() -> None:
    results = in_ranks(2, _in_two_processes)
    assert len({*results}) == len(results) == 2
