"""LoRA adapters of peft, also on quantised layers: where a surgery acts, and what it refuses."""

# pyright: reportMissingImports=false

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.plugins.fields import SelectionError

peft: Any = None  # imported by the first test
pytestmark = [
    pytest.mark.skipif(not find_spec("peft"), reason="needs the extra trainers"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::gradsurg.effects.ledger.SurgeryWarning"),
]

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def _import() -> None:
    globals()["peft"] = import_module("peft")


class Net(nn.Module):
    def __init__(self, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = linear(64, 64), linear(64, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


def lora(net: nn.Module) -> Any:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=["first", "second"], lora_dropout=0.0)
    return peft.get_peft_model(net, config)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def trained(model: Any, *interventions: gs.Intervention) -> gs.Live:
    optimizer = optimizer_of(model)
    with gs.Surgery(*interventions).attach(model, optimizer) as live:
        train(model, optimizer)
    return live


@pytest.mark.slow
def test_a_surgery_on_adapters_equals_plain_hooks_bit_by_bit() -> None:
    model, plain = lora(Net()), lora(Net())
    trained(model, gs.Intervention(gs.Clip(1e-3), gs.Parameters("*lora_B*")))
    for name, param in plain.named_parameters():
        if "lora_B" in name:
            param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    train(plain, optimizer_of(plain))
    pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)
    keys = peft.get_peft_model_state_dict(model).keys()
    assert keys == peft.get_peft_model_state_dict(lora(Net())).keys()


@pytest.mark.full
@pytest.mark.parametrize(
    ("at", "sites"),
    [
        (gs.Parameters(), 4),
        (gs.Parameters("*lora_A*", stage="step"), 2),
        (gs.Updates("*lora_B*"), 2),
        (gs.Outputs("*lora_B.default"), 2),
        (gs.Outputs("*first"), 1),
        (gs.Inputs("*second"), 1),
        (gs.Nodes("Relu"), 2),
        (gs.Activations("*lora_B*"), 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["float32", "4bit", "8bit"])
def test_sites_with_a_gradient_are_acted_on_also_beside_quantised_weights(
    at: Any, sites: int, kind: str
) -> None:
    live = trained(lora(quantised(kind)), gs.Intervention(gs.Scale(0.5), at))
    rows = live.effects.rows()
    assert len(rows) == sites
    assert all(row["calls"] == 3 for row in rows)


def quantised(kind: str) -> nn.Module:
    if kind == "float32":
        return Net()
    bitsandbytes = pytest.importorskip("bitsandbytes")
    if kind == "8bit":
        return Net(lambda i, o: bitsandbytes.nn.Linear8bitLt(i, o, has_fp16_weights=False)).to(
            "cpu"
        )
    return Net(lambda i, o: bitsandbytes.nn.Linear4bit(i, o, compute_dtype=torch.float32)).to("cpu")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["float32", "4bit", "8bit"])
def test_the_weights_below_an_adapter_are_refused_by_name(kind: str) -> None:
    model = lora(quantised(kind))
    at = gs.Parameters("*first.base_layer.weight")
    with pytest.raises(SelectionError, match=r"is frozen: base_model\.model\.first\.base_layer"):
        trained(model, gs.Intervention(gs.Clip(0.1), at))
    with pytest.raises(SelectionError, match=r"nothing matches '\*first\.weight'"):
        trained(model, gs.Intervention(gs.Clip(0.1), gs.Parameters("*first.weight")))


@pytest.mark.full
def test_the_output_of_a_frozen_first_layer_has_no_gradient_and_is_told() -> None:
    at = gs.Outputs("*first.base_layer")
    with pytest.warns(gs.SurgeryWarning, match=r"first\.base_layer#0 \(needs no gradient\)"):
        trained(lora(Net()), gs.Intervention(gs.Scale(0.5), at))
