"""The command with small scripts: what it prints, writes, refuses and runs again."""

import json
import re
from pathlib import Path

import polars as pl
import pytest

from gradsurg.report.compare import compare
from gradsurg.report.study import read_study
from tests.script.running import Ended, python, script

pytestmark = pytest.mark.slow

PLAIN = """
import argparse, os, sys
import torch
from torch import nn
from helper import data

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--lr", type=float, default=0.3)
parser.add_argument("--fail", type=int)
parser.add_argument("--save", default="model.pt")
args = parser.parse_args()
if args.seed is not None:
    torch.manual_seed(args.seed)
x, y = data()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for step in range(1, 21):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss={loss.item():.6f}, val_acc={step / 100}")
if args.fail == int(os.environ.get("GRADSURG_SEED", "0")):
    raise RuntimeError("the disk is full")
torch.save(model.state_dict(), args.save)
"""
HELPER = """
import torch

def data():
    x = torch.randn(64, 8)
    return x, (x[:, 0] > 0).long()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PLAIN, encoding="utf-8")
    (tmp_path / "helper.py").write_text(HELPER, encoding="utf-8")
    return tmp_path


def run(folder: Path, *words: str) -> Ended:
    return script(folder, "transform=clip", "report=false", *words)


def test_finished_runs_are_kept_for_another_metric_and_an_edited_helper_trains_anew(
    folder: Path,
) -> None:
    first = run(folder, "seeds=1", "--", "train.py")
    assert first.code == 0, first.err
    assert "* val_acc  printed, 2 values, last 0.2" in first.err
    assert "warning: model.pt in this folder: written by 2 runs" in first.err
    study = read_study(folder / "runs/train")
    assert {run.state for run in study.all_runs} == {"finished"}
    row = compare(study).row(0, named=True)
    assert (row["metric"], row["treated"], row["control"]) == ("outcome/val_acc", 0.2, 0.2)
    assert study.metrics.filter(arm="clip")["step"].to_list() == [10, 20]
    assert study.effects.filter(arm="clip").select("step").unique().item() == 20

    again = run(folder, "seeds=1", "metric=loss", "--", "train.py")
    assert "2 runs of train.py; 2 finished before" in again.err
    assert "outcome/loss" in compare(read_study(folder / "runs/train"))["metric"].to_list()
    unknown = run(folder, "seeds=1", "metric=test_acc", "--", "train.py")
    none = "metric: the script reported no test_acc. There are: loss, val_acc."
    assert unknown.err.splitlines()[-1] == none

    (folder / "helper.py").write_text(f"{HELPER}\n# edited\n", encoding="utf-8")
    edited = run(folder, "seeds=1", "--", "train.py")
    assert "2 runs of train.py\n" in edited.err
    assert len(read_study(folder / "runs/train").all_runs) == 4


def test_a_script_that_seeds_itself_is_noticed_and_gets_no_p(folder: Path) -> None:
    ended = run(folder, "seeds=8", "--", "train.py", "--seed", "7")
    assert ended.code == 0
    assert "the script seeds itself (torch.manual_seed(7))" in ended.err
    assert "give the script {seed}, such as --seed {seed}" in ended.err
    assert len(read_study(folder / "runs/train").all_runs) == 3
    handed = run(folder, "seeds=2", "study=handed", "--", "train.py", "--seed", "{seed}")
    assert "seeds itself" not in handed.err
    assert len(read_study(folder / "runs/handed").all_runs) == 4


def test_a_failed_run_has_the_frames_of_the_script_alone(folder: Path) -> None:
    ended = run(folder, "seeds=2", "jobs=2", "--", "train.py", "--fail", "1")
    assert ended.code == 1
    error = (ended.runs("train")["clip-seed1"] / "error.log").read_text(encoding="utf-8")
    assert error.startswith("Traceback (most recent call last):\n  File")
    assert error.endswith("RuntimeError: the disk is full\n")
    assert re.findall(r"File \"([^\"]+)\"", error) == ["train.py"]
    states = {run.name[:10]: run.state for run in read_study(folder / "runs/train").all_runs}
    assert sorted(states.values()) == ["failed", "failed", "finished", "finished"]
    first = run(folder, "seeds=2", "--", "train.py", "--fail", "0")
    assert (first.code, "the first run failed" in first.err) == (1, True)


def test_each_arm_chooses_an_option_of_the_script(folder: Path) -> None:
    tune = "tune=--lr=[0.01,0.3]; transform.clip.value=[0.01,0.02]"
    ended = run(folder, "seeds=1", "tune_seeds=1", "metric=loss", tune, "--", "train.py")
    assert ended.code == 0, ended.err
    files = sorted((folder / "runs/train/tuning").glob("*.json"))
    control, treated = sorted(
        (json.loads(file.read_text(encoding="utf-8")) for file in files), key=lambda x: x["role"]
    )
    assert control["chosen"] == {"--lr": 0.3}  # of four rates, to try as many as the treated arm
    assert [row["values"]["--lr"] for row in control["rows"]] == [0.01, 0.03107, 0.09655, 0.3]
    assert treated["chosen"] == {"--lr": 0.3, "transform.clip.value": 0.02}
    assert len(treated["rows"]) == 4
    assert control["runs"] == [ended.runs("train")["none-seed0"].name]


def test_a_dry_run_prints_the_sites_and_leaves_no_run(folder: Path) -> None:
    ended = run(folder, "dry_run=true", "--", "train.py")
    assert ended.code == 0
    assert "4 sites selected (*)" in ended.out
    assert ended.out.endswith("attached to Sequential (model) and SGD\n")
    assert not list((folder / "runs").rglob("run.json"))


ODD = """
import os, sys, torch
from torch import nn

kind = sys.argv[1]
x = torch.randn(64, 8)
y = (x[:, 0] > 0).long()

def net(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

def fit(call, *optimizers):
    for _ in range(10):
        loss = nn.functional.cross_entropy(call(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    print("loss:", loss.item())

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

class SAM(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure=None):
        self.base.step()

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 2)

    def predict(self, x):
        return self.b(self.a(x).relu())
"""
KINDS = {
    "head first": """
model = net()
model[0].requires_grad_(False)
head = sgd(model[2].parameters())
fit(model, head)
model[0].requires_grad_(True)
fit(model, sgd(model.parameters()))
""",
    "alternating": """
model = net()
first, second = sgd(model.parameters()), torch.optim.Adam(model.parameters())
for optimizer in (first, second, first, second):
    fit(model, optimizer)
""",
    "chain": """
enc, dec = nn.Linear(8, 16), nn.Linear(16, 2)
fit(lambda x: dec(enc(x).relu()), sgd([*enc.parameters(), *dec.parameters()]))
""",
    "two optimizers": """
model = Pair()
fit(model.predict, sgd(model.a.parameters()), sgd(model.b.parameters()))
""",
    "sam": """
model = net()
fit(model, SAM(model.parameters()))
""",
    "lbfgs": """
model = net()
optimizer = torch.optim.LBFGS(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss
for _ in range(3):
    print("loss:", optimizer.step(closure).item())
""",
    "compiled": """
model = net()
optimizer = sgd(model.parameters())
compiled = torch.compile(model, backend="aot_eager")
with torch.no_grad():
    compiled(x)
fit(compiled, optimizer)
""",
    "os._exit": """
model = net()
fit(model, sgd(model.parameters()))
os._exit(0)
""",
}
FOUND = {
    "head first": (["attached to Sequential (model) and SGD", "from step 10: SGD"], 20, 4),
    "alternating": (["attached to Sequential (model) and SGD", "from step 10: Adam"], 40, 4),
    "chain": (["attached to ModuleDict (enc and dec) and SGD"], 10, 4),
    "two optimizers": (["attached to Pair (model) and SGD, SGD"], 10, 4),
    "sam": (["attached to Sequential (model) and SAM"], 10, 4),
    "lbfgs": (["attached to Sequential (model) and LBFGS"], 3, 4),
    "compiled": (["attached to OptimizedModule (call) and SGD"], 10, 4),
    "os._exit": (["attached to Sequential (model) and SGD"], 10, 4),
}
"""The model found, the number of counted steps, and the sites with gradients in the last one."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_of_a_script_is_found(kind: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD + KINDS[kind], encoding="utf-8")
    ended = run(tmp_path, "seed=0", "control=none", "--", "odd.py", kind)
    assert ended.code == 0, ended.err
    path = ended.runs("odd")["clip-seed0"]
    found = json.loads((path / "ended.json").read_text(encoding="utf-8"))
    notes, steps, sites = FOUND[kind]
    assert len(found["found"]) == len(notes)
    assert all(part in note for part, note in zip(notes, found["found"], strict=True))
    assert found["steps"] == steps
    effects = read_study(tmp_path / "runs/odd").effects
    last = effects.filter(pl.col("step") == effects["step"].max(), pl.col("calls") > 0)
    assert last["site"].n_unique() == sites


REFUSED = {
    "two models": (
        "a, b = net(), Pair()\n"
        "fit(lambda x: a(x) + b.predict(x), sgd(a.parameters()), sgd(b.parameters()))",
        "model: 2 models are trained, Sequential (a), Pair (b): write model=a or model=b",
    ),
    "one after the other": (
        "a, b = net(), Pair()\nfit(a, sgd(a.parameters()))\nfit(b.predict, sgd(b.parameters()))",
        "model: 2 models are trained, one after the other, Sequential (a), Pair (b): write model=a",
    ),
    "tensors": (
        "w = torch.randn(8, 2, requires_grad=True)\nfit(lambda x: x @ w, sgd([w]))",
        "(found SGD of 1 tensors; 10 steps)",
    ),
    "subprocess": (
        "os.system('true')",
        "(found no optimizer; 0 steps). Updates by hand, tensors without a module, and training in",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_nothing_is_left_out_in_silence(kind: str, tmp_path: Path) -> None:
    code, sentence = REFUSED[kind]
    (tmp_path / "odd.py").write_text(f"{ODD}\n{code}\n", encoding="utf-8")
    ended = run(tmp_path, "seeds=2", "--", "odd.py", kind)
    assert ended.code == 2
    assert sentence in ended.err
    assert len(ended.err.splitlines()) == 2


def test_a_named_model_is_attached_and_a_wrong_name_refused(tmp_path: Path) -> None:
    code, _ = REFUSED["two models"]
    (tmp_path / "odd.py").write_text(f"{ODD}\n{code}\n", encoding="utf-8")
    ended = run(tmp_path, "seed=0", "control=none", "model=Pair", "--", "odd.py", "-")
    assert "attached to Pair (b) and SGD\n" in ended.err
    wrong = run(tmp_path, "seed=0", "model=c", "study=wrong", "--", "odd.py", "-")
    text = "model=c: no trained model has this name or class; seen: Sequential (a), Pair (b)"
    assert (wrong.code, wrong.err.splitlines()[-1]) == (2, text)


def test_without_words_the_usage_is_followed_by_what_is_missing(tmp_path: Path) -> None:
    ended = python(tmp_path, "-m", "gradsurg.script")
    assert (ended.code, ended.out.startswith("usage: ")) == (2, True)
    assert ended.err == "write python -m gradsurg.script -- SCRIPT.py: the -- is missing\n"


def test_torchrun_stands_in_front(folder: Path) -> None:
    text = PLAIN.replace(
        "x, y = data()", "x, y = data()\ntorch.distributed.init_process_group('gloo')"
    )
    wrapped = text.replace(
        "optimizer =", "model = nn.parallel.DistributedDataParallel(model)\noptimizer ="
    )
    (folder / "train.py").write_text(wrapped, encoding="utf-8")
    words = ("transform=clip", "report=false", "seed=0", "--", "train.py", "--save", "{out}/w.pt")
    ended = python(
        folder, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "gradsurg.script", *words
    )
    assert ended.code == 0, ended.err
    assert "attached to DistributedDataParallel (model) and SGD" in ended.err
    config = read_study(folder / "runs/train").all_runs[0].config
    assert config is not None
    assert config["script"]["ranks"] == 2
