"""The app of docs/how/hydra_app.md trains as by hand, bit for bit."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor, nn

import gradsurg as gs
from tests.test_readme import ROOT

PAGE = ROOT / "docs/how/hydra_app.md"
FILE = re.compile(r"^```(?:yaml|python)\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Lightning
    pytest.mark.filterwarnings("error::gradsurg.effects.ledger.SurgeryWarning"),
]
SCAFFOLD = {
    "configs/app.yaml": """
seed: 1
model: {_target_: digits.Classifier, lr: 0.1}
data: {_target_: digits.loader, batch_size: 64}
trainer: {_target_: lightning.Trainer, max_epochs: 2, accelerator: cpu, logger: false}
""",
    "src/digits.py": """
import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, index):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader(batch_size):
    inputs, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    return DataLoader(TensorDataset(inputs.float() / 16, labels), batch_size)
""",
    "src/app.py": """
import hydra
import lightning
from hydra.utils import instantiate


def run(config):
    lightning.seed_everything(config.seed)
    model, data = instantiate(config.model), instantiate(config.data)
    callbacks = {name: instantiate(one) for name, one in config.callbacks.items()}
    instantiate(config.trainer, callbacks=[*callbacks.values()]).fit(model, data)
    print(callbacks["gradsurg"].effects.table())
    return model


if __name__ == "__main__":
    hydra.main(version_base="1.3", config_path="../configs", config_name="train")(run)()
""",
}
"""The reader's own app, which the page takes as given."""
BY_HAND = {
    "": (),
    "+surgery=clip": (gs.Clip(0.01), gs.Parameters()),
    "+surgery=grokfast": (gs.GrokfastEMA(), gs.Parameters(stage="step")),
    "+surgery=guided_backprop": (gs.ScaleBySign(), gs.Nodes("rectifier")),
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the app, whose src/ is on the path."""
    pytest.importorskip("lightning", reason="needs the extra trainers")
    folder = tmp_path_factory.mktemp("app")
    for name, text in [*SCAFFOLD.items(), *FILE.findall(PAGE.read_text(encoding="utf-8"))]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "src"))
        patch.chdir(folder)
        yield folder
        for name in ("app", "digits"):
            sys.modules.pop(name, None)


def composed(app: Path, *words: str) -> Any:
    with initialize_config_dir(str(app / "configs"), version_base="1.3"):
        return compose("train", [word for word in words if word])


def weights_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters())


def trained_by_hand(surgery: gs.Surgery) -> tuple[Tensor, str]:
    """The weights of the same training in a plain loop, and the table of the effects."""
    import_module("lightning").seed_everything(1)
    digits = import_module("digits")
    model = digits.Classifier(0.1)
    optimizer = model.configure_optimizers()
    with surgery.attach(model, optimizer) as live:
        for batch in [*digits.loader(64)] * 2:
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            optimizer.step()
    return weights_of(model), live.effects.table()


@pytest.mark.slow
def test_the_app_trains_as_by_hand(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for word, parts in BY_HAND.items():
        weights = weights_of(import_module("app").run(composed(app, word)))
        surgery = gs.Surgery(*([gs.Intervention(*parts)] if parts else []))
        printed = capsys.readouterr().out
        expected, table = trained_by_hand(surgery)
        assert torch.equal(weights, expected), word
        assert printed.rstrip().endswith(table.rstrip()), word
        results.append(weights)
    pairs = [(a, b) for a in range(4) for b in range(a)]
    assert not any(torch.equal(results[a], results[b]) for a, b in pairs)


@pytest.mark.slow
def test_the_loop_and_the_callback_with_own_code_train_as_the_app(
    app: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = composed(app, "+surgery=grokfast", "callbacks=own_code")
    whole = weights_of(import_module("app").run(config))
    import_module("lightning").seed_everything(1)
    digits = import_module("digits")
    model = digits.Classifier(0.1)
    batches = [*digits.loader(64)] * 2
    (call,) = re.findall(
        r"^`(gs\.from_config\(.*?\))` makes", PAGE.read_text("utf-8"), re.MULTILINE
    )
    optimizer = model.configure_optimizers()
    with eval(call, {"gs": gs, "config": config}).attach(model, optimizer) as live:
        for batch in batches:
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            optimizer.step()
    table = live.effects.table()
    assert torch.equal(weights_of(model), whole)
    assert capsys.readouterr().out.rstrip().endswith(table.rstrip())


def test_the_words_of_the_page_choose_the_parts_of_a_surgery(app: Path) -> None:
    rows = re.findall(r"^\| `'?(\+surgery=.*?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    made = {}
    for words in rows:
        config = composed(app, *words.replace("'", "").split(" "))
        (made[words],) = gs.from_config(config.surgery).interventions
    transforms = [each.transform for each in made.values()]
    chain = gs.Chain(gs.Clip(0.01), gs.Sign())
    assert transforms[:4] == [gs.GrokfastEMA(), gs.Clip(0.1), gs.Clip(0.01), chain]
    sites = [each.at for each in made.values()]
    step = gs.Parameters(stage="step")
    relus, every = gs.Outputs(types="ReLU"), gs.Parameters()
    assert sites == [step, every, step, every, relus, every]
    assert [each.when for each in made.values()] == [gs.Always()] * 5 + [gs.Steps(stop=20)]


def test_without_a_word_the_callback_has_no_intervention(app: Path) -> None:
    for callbacks in ("gradsurg", "own_code"):
        config = composed(app, f"callbacks={callbacks}")
        assert instantiate(config.callbacks.gradsurg).surgery == gs.Surgery()


@pytest.mark.slow
def test_the_command_of_the_app_runs(app: Path) -> None:
    command = [sys.executable, "src/app.py", "+surgery=clip", "surgery.transform.clip.value=-1"]
    environment = os.environ | {"HYDRA_FULL_ERROR": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "transform.clip.value: must be > 0, such as 0.01, found -1" in done.stderr
    done = subprocess.run([*command[:-1], "trainer.max_epochs=1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "net.0.weight" in done.stdout
