"""Archives of a model and a surgery: they train on bit-identically, and refuse clearly."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsurg as gs
from gradsurg import packaging
from gradsurg.sites.places import Selector
from tests.nets import small

THEIRS = """
import torch
from torch import nn

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless
from their_helper import FACTOR


@validated
class Shrink(Stateless):
    times: int = 1

    @property
    def properties(self):
        return frozenset({"elementwise", "linear", "homogeneous", "odd", "deterministic"})

    def apply(self, grad, context):
        return grad * FACTOR**self.times


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "their_code.py").write_text(THEIRS, encoding="utf-8")
    (tmp_path / "their_helper.py").write_text("FACTOR = 0.5\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import their_code  # pyright: ignore[reportMissingImports] - written above

    yield their_code
    for name in ("their_code", "their_helper"):
        sys.modules.pop(name, None)


def pair_of(theirs: Any) -> tuple[nn.Module, gs.Surgery]:
    chain = gs.Chain(gs.GrokfastEMA(), gs.AddNoise(0.01), theirs.Shrink(2))
    return theirs.Net(), gs.Surgery(gs.Intervention(chain, when=gs.Steps(every=2)), seed=3)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def train(model: nn.Module, surgery: gs.Surgery, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with surgery.attach(model, optimizer):
        run(model, optimizer, seed)


@pytest.mark.parametrize("attach", [False, True])
def test_a_loaded_surgery_trains_on_bit_identically_where_its_code_is_missing(
    attach: bool, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, surgery = pair_of(theirs)
    train(model, surgery, seed=1)
    contents = packaging.save(tmp_path / "model.pt", model, surgery)
    assert contents.captured == ("their_code", "their_helper")
    assert {"gradsurg.core.surgery", "torch.nn", "builtins"} <= {*contents.environment}
    assert contents.mocked == ()
    assert "captured: their_code, their_helper" in str(contents)
    assert [path.name for path in tmp_path.glob("*model*")] == ["model.pt"]
    train(model, surgery, seed=2)
    monkeypatch.undo()  # the path to their code
    del sys.modules["their_code"], sys.modules["their_helper"]
    loaded, again, *live = packaging.load(tmp_path / "model.pt", trust=True, attach=attach)
    if attach:
        optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
        live[0].bind(optimizer)
        run(loaded, optimizer, seed=2)
        live[0].close()
    else:
        train(loaded, again, seed=2)
    assert "their_code" not in sys.modules
    assert type(loaded) is not type(model)
    pairs = zip(model.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_patterns_of_the_user_come_first_and_are_reported(theirs: Any, tmp_path: Path) -> None:
    path, pair = tmp_path / "model.pt", pair_of(theirs)
    contents = packaging.save(path, *pair, extern=["their_helper"])
    assert contents.captured == ("their_code",)
    assert "their_helper" in contents.environment
    contents = packaging.save(path, *pair, mock=["their_helper"])
    assert contents.mocked == ("their_helper",)
    assert str(contents).endswith("mocked: their_helper")
    with pytest.raises(ValueError, match="cannot be packaged: .*nowhere"):
        packaging.save(path, *pair, intern=["nowhere.**"])


def test_an_archive_is_loaded_only_with_trust_and_told_of_other_versions(
    theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    packaging.save(path, *pair_of(theirs))
    with pytest.raises(ValueError, match=r"holds code, and loading runs it: load\(path, trust"):
        packaging.load(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        packaging.load(tmp_path / "nothing.pt", trust=True)
    monkeypatch.setattr("gradsurg.__version__", "99")
    with pytest.warns(gs.SurgeryWarning, match=r"was saved with .*, loaded with gradsurg 99"):
        packaging.load(path, trust=True)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"is no archive of gradsurg\.packaging\.save"):
        packaging.load(path, trust=True)
    torch.save(small(), path)
    with pytest.raises(ValueError, match=r"is no archive of gradsurg\.packaging\.save"):
        packaging.load(path, trust=True)


@pytest.mark.parametrize("at", [gs.Parameters(), gs.Outputs(), gs.Nodes("Relu")], ids=str)
@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")  # no gradient ever passed
def test_an_attached_model_is_refused_also_with_another_surgery(
    at: Selector, tmp_path: Path
) -> None:
    model, other = small(), gs.Surgery(gs.Intervention(gs.Clip(0.1)))
    surgery = gs.Surgery(gs.Intervention(gs.Clip(0.1), at))
    with surgery.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        for each in (surgery, other):
            with pytest.raises(ValueError, match="the model is attached to a surgery: save it"):
                packaging.save(tmp_path / "model.pt", model, each)
    packaging.save(tmp_path / "model.pt", model, surgery)


def test_what_an_archive_cannot_hold_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, surgery = small(), gs.Surgery(gs.Intervention(gs.Clip(0.1)))
    model.first.weight.register_hook(lambda grad: grad)
    with pytest.warns(gs.SurgeryWarning, match=r"not in the archive: first\.weight"):
        packaging.save(tmp_path / "model.pt", model, surgery)
    model = small()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="cannot be packaged: .*<lambda>"):
        packaging.save(tmp_path / "other.pt", model, surgery)

    class Net(nn.Sequential):
        pass

    Net.__module__, Net.__qualname__ = "__main__", "Net"
    monkeypatch.setattr(sys.modules["__main__"], "Net", Net, raising=False)
    with pytest.raises(ValueError, match=r"the script itself \(__main__\); put it into a module"):
        packaging.save(tmp_path / "other.pt", Net(), surgery)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
