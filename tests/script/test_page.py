"""The commands of docs/how/script.md print what the page shows."""

import re
import shlex
from pathlib import Path

import pytest

from gradsurg.script.words import KNOWN
from tests.script.running import python
from tests.test_readme import ROOT, blocks

PAGE = "docs/how/script.md"
SCRIPT = """
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.3)
arguments = parser.parse_args()

x = torch.randn(400, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
for epoch in range(arguments.epochs):
    for rows in torch.randperm(300).split(20):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(x[300:]).argmax(1) == y[300:]).float().mean()
    print(f"epoch {epoch}: loss={loss:.4f}, val_acc={accuracy:.4f}")
"""


@pytest.mark.full
def test_the_page_shows_what_its_commands_print(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    dry, seeds = (shlex.split(text)[2:] for text in blocks("console", PAGE))
    sites, shown = blocks("text", PAGE)
    tree = python(tmp_path, *dry).out
    assert tree.endswith(sites)
    assert tree.count("\n*") == 4
    ended = python(tmp_path, *seeds)
    assert ended.code == 0, ended.err
    printed = {*map(str.rstrip, ended.out.splitlines())}
    assert [line for line in shown.splitlines() if line.rstrip() not in printed] == []
    assert len(shown.splitlines()) == 2


def test_each_word_of_the_table_of_the_page_is_known() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    words = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    keys = {word.partition("=")[0] for cell in words for word in re.findall(r"[\w.]+=", cell)}
    others = {"node", "lr", "transform.clip.value"}  # torchrun's and the script's
    assert keys <= {*KNOWN, *others}
    assert {"seeds", "model", "tune", "jobs"} <= keys
