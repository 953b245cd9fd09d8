"""Ten scripts as people write them: as trained with the surgery attached by hand, bit for bit."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsurg.experiment.frames import effect_table
from tests.script.running import SCRIPTS, python, script

pytestmark = pytest.mark.slow

HEADER = """
import atexit, json, os, sys
import gradsurg as gs
from gradsurg.torch_internals import random_state

surgery = gs.Surgery(gs.Intervention(gs.Clip(0.01), gs.{site}))
lives = []

@atexit.register
def write_effects():
    rows = [row for live in lives for row in live.effects.rows()]
    open(os.environ["EFFECTS"], "w").write(json.dumps(rows, default=float))

random_state.seed(0)
"""
LIGHTNING = """
from gradsurg.integrations.lightning import SurgeryCallback
callback = SurgeryCallback(surgery)
lives.append(callback)
"""
TRANSFORMERS = LIGHTNING.replace("lightning", "transformers")
START = "lives.append(surgery.start({}, {}))"


@dataclass(frozen=True)
class Row:
    """A script with its words, and how its user would attach the surgery: text before a line."""

    name: str
    words: str
    line: str
    attach: str
    weights: str = "weights.pt"
    own: tuple[str, ...] = ()
    header: str = ""
    site: str = "Parameters()"
    folds: bool = False
    replaced: tuple[str, str] = field(default=("", ""))


def started(model: str, optimizer: str) -> str:
    return START.format(model, optimizer)


SAVE = "--save {out}/weights.pt"
ROWS = [
    Row("digits", SAVE, "    began = time.time()", started("model", "optimizer")),
    Row(
        "digits",
        SAVE,
        "    began = time.time()",
        started("model", "optimizer"),
        own=("site=relu_nodes",),
        site='Nodes("Relu", side="enter")',
    ),
    Row(
        "logged",
        f"--folder {{out}} {SAVE}",
        '    best, step = float("inf"), 0',
        started("model", "optimizer"),
    ),
    Row(
        "lit",
        SAVE,
        "",
        "",
        header=LIGHTNING,
        replaced=("logger=False,", "logger=False, callbacks=[callback],"),
    ),
    Row(
        "gpt2",
        "--output_dir {out}",
        "",
        "",
        header=TRANSFORMERS,
        replaced=("[Printer()]", "[Printer(), callback]"),
    ),
    Row(
        "accelerated",
        SAVE,
        "    for epoch in range(args.num_epochs):",
        started("model", "optimizer"),
    ),
    Row(
        "gan",
        SAVE,
        "        self.criterion = nn.BCEWithLogitsLoss()",
        started("self.G", "self.opt_g"),
        own=("model=G",),
    ),
    Row(
        "hydra_app",
        "hydra.run.dir={out}/hydra save={out}/weights.pt model=large",
        "    for step in range(1, cfg.steps + 1):",
        started("model", "optimizer"),
    ),
    Row(
        "amp_ema",
        "--checkpoint {out}/weights.pt",
        "    for update in range(args.updates):",
        started("student", "optimizer"),
    ),
    Row(
        "cross_validation",
        SAVE,
        "    x, y = torch.from_numpy(x), torch.from_numpy(y)",
        "live = gs.Surgery(*surgery.interventions).start(model, optimizer)",
        folds=True,
    ),
    Row("reinforce", SAVE, "    recent = deque(maxlen=20)", started("agent", "optimizer")),
]


def by_hand(row: Row, with_surgery: bool) -> str:
    """The text of a script whose user has attached the surgery."""
    text = (SCRIPTS / f"{row.name}.py").read_text(encoding="utf-8")
    if with_surgery and row.line:
        assert text.count(f"{row.line}\n") == 1
        indent = " " * (len(row.line) - len(row.line.lstrip()))
        text = text.replace(f"{row.line}\n", f"{indent}{row.attach}\n{row.line}\n")
    elif with_surgery:
        assert text.count(row.replaced[0]) == 1
        text = text.replace(*row.replaced)
    header = row.header if with_surgery else ""
    return HEADER.format(site=row.site) + header + text


def loaded(path: Path) -> list[torch.Tensor]:
    def leaves(value: Any) -> list[torch.Tensor]:  # Any: nested containers
        if isinstance(value, torch.Tensor):
            return [value]
        inside = value.values() if isinstance(value, dict) else value
        return [one for inner in inside for one in leaves(inner)]

    return leaves(torch.load(path))


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.name} {row.site}" for row in ROWS])
def test_a_script_trains_as_with_the_surgery_attached_by_hand(row: Row, tmp_path: Path) -> None:
    ended = script(
        tmp_path,
        "transform=clip",
        "transform.clip.value=0.01",
        "seeds=1",
        "report=false",
        *row.own,
        "--",
        str(SCRIPTS / f"{row.name}.py"),
        *row.words.split(),
    )
    assert ended.code == 0, ended.err
    runs = ended.runs(row.name)
    weights = {}
    for arm, label in ((True, "clip-seed0"), (False, "none-seed0")):
        own = tmp_path / f"hand-{label}"
        own.mkdir()
        edited = own / f"{row.name}.py"
        edited.write_text(by_hand(row, arm), encoding="utf-8")
        (own / "conf").symlink_to(SCRIPTS / "conf")
        words = [word.replace("{out}", str(own)) for word in row.words.split()]
        effects, path = own / "effects.json", str(SCRIPTS)
        variables = {"EFFECTS": str(effects), "GRADSURG_SEED": "0"}
        hand = python(
            own,
            str(edited),
            *words,
            **variables,
            PYTHONPATH=f"{Path.cwd()}:{path}",
            PYTHONHASHSEED="0",
        )
        assert hand.code == 0, hand.err
        weights[arm] = loaded(own / row.weights)
        mine = loaded(runs[label] / "files" / row.weights)
        assert len(mine) == len(weights[arm])
        assert all(map(torch.equal, mine, weights[arm])), f"{label} has other weights"
        if arm and not row.folds:
            assert_equal_effects(runs[label], json.loads(effects.read_text(encoding="utf-8")))
    assert not all(map(torch.equal, weights[True], weights[False])), "clip changed nothing"


def assert_equal_effects(run: Path, rows: list[dict[str, float]]) -> None:
    by_place = {(row["transform"], row["site"]): row for row in rows}
    mine = effect_table([run])
    assert mine
    assert len(mine) == len(by_place)
    for row in mine:
        other = by_place[row["transform"], row["site"]]
        assert row["calls"] == other["calls"]
        for name in ("norm_before", "norm_after", "cosine", "changed"):
            assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-9), name
