"""Models: shapes, names, defaults that match their yaml, and refusals."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from gradsurg import catalogue
from gradsurg.fields import FieldError
from gradsurg.models.convnet import Convnet
from gradsurg.models.mlp import MLP

CONF = Path(__file__).parent.parent / "conf" / "model"
NAMES = catalogue.names("models")


def fields_of(name) -> dict:
    content = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(content, dict)
    assert content.pop("name") == name
    return content


def test_every_model_has_a_yaml_and_every_yaml_a_model():
    assert NAMES == sorted(path.stem for path in CONF.glob("*.yaml")) != []


@pytest.mark.parametrize("name", NAMES)
def test_yaml_and_defaults_are_the_same_model(name):
    made = catalogue.find("models", name)
    torch.manual_seed(0)
    written = made((1, 8, 8), 10, **fields_of(name))
    torch.manual_seed(0)
    default = made((1, 8, 8), 10)
    assert str(written) == str(default)
    for a, b in zip(written.parameters(), default.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 17, 32)])
def test_output_has_a_row_an_example_and_every_parameter_a_gradient(name, shape):
    torch.manual_seed(0)
    model = catalogue.find("models", name)(shape, 7)
    outputs = model(torch.randn(5, *shape))
    assert outputs.shape == (5, 7)
    outputs.square().sum().backward()
    for path, param in model.named_parameters():
        assert param.grad is not None, path
        assert param.grad.abs().sum() > 0, path


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_modules(name):
    model = catalogue.find("models", name)((1, 8, 8), 10)
    assert [path for path, part in model.named_modules() if isinstance(part, nn.ReLU)] == [
        f"{'hidden' if name == 'mlp' else 'blocks'}.{index}.relu" for index in (0, 1)
    ]


def test_mlp_is_what_its_formula_says():
    torch.manual_seed(0)
    model = MLP((2, 3), 4, hidden=[5], activation="tanh")
    inputs = torch.randn(7, 2, 3)
    first, first_bias, last, last_bias = model.parameters()
    expected = torch.tanh(inputs.reshape(7, 6) @ first.T + first_bias) @ last.T + last_bias
    torch.testing.assert_close(model(inputs), expected)


def test_mlp_without_hidden_layers_is_linear():
    assert [path for path, _ in MLP((4,), 2, hidden=()).named_parameters()] == [
        "output.weight",
        "output.bias",
    ]


def test_mlp_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = MLP((8,), 2, hidden=(64,), dropout=0.5)
    inputs = torch.ones(1, 8)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_convnet_is_what_its_formula_says():
    torch.manual_seed(0)
    model = Convnet((1, 4, 4), 3, channels=[2])
    images = torch.randn(5, 1, 4, 4)
    kernel, kernel_bias, last, last_bias = model.parameters()
    maps = torch.relu(nn.functional.conv2d(images, kernel, kernel_bias, padding=1))
    pooled = maps.reshape(5, 2, 2, 2, 2, 2).amax(dim=(3, 5))
    expected = pooled.mean(dim=(2, 3)) @ last.T + last_bias
    torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize(
    ("made", "shape", "options", "faults"),
    [
        (MLP, (8,), {"hidden": [64, 0]}, [("hidden.1", "must be > 0, found 0")]),
        (MLP, (8,), {"dropout": 1.0}, [("dropout", "must be < 1.0, found 1.0")]),
        (MLP, (0,), {}, [("input_shape.0", "must be > 0, found 0")]),
        (
            MLP,
            (8,),
            {"activation": "rely", "dropout": -1},
            [
                ("activation", "must be one of 'relu', 'tanh' or 'gelu', found 'rely'"),
                ("dropout", "must be >= 0.0, found -1"),
            ],
        ),
        (Convnet, (64,), {}, [("input_shape", "must be (channels, height, width), found (64,)")]),
        (
            Convnet,
            (1, 8, 8),
            {"channels": []},
            [("channels", "must have at least one entry, found none")],
        ),
        (
            Convnet,
            (1, 8, 64),
            {"channels": [4, 4, 4, 4]},
            [
                (
                    "channels",
                    "must have at most 3 entries, because each halves an image of 8 x 64, found 4",
                )
            ],
        ),
    ],
)
def test_bad_values_are_refused_by_name(made, shape, options, faults):
    with pytest.raises(FieldError) as caught:
        made(shape, 2, **options)
    assert caught.value.faults == faults


def test_the_deepest_convnet_an_image_allows_works():
    assert Convnet((1, 8, 8), 3, channels=[2, 2, 2])(torch.zeros(1, 1, 8, 8)).shape == (1, 3)
