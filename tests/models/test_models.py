"""Models: shapes, names, defaults that match their yaml, and refusals."""

import pytest
import torch
from hydra.utils import get_object
from omegaconf import OmegaConf
from torch import nn

from gradsurg.models._transformer import Attention
from gradsurg.models.convnet import Convnet
from gradsurg.models.gpt import GPT
from gradsurg.models.mlp import MLP
from gradsurg.models.multi_head import MultiHead
from gradsurg.models.point import Point
from gradsurg.models.resnet import ResNet
from gradsurg.models.rnn import RNN
from gradsurg.models.vit import ViT
from gradsurg.plugins.fields import FieldError
from tests import papers

NAMES = papers.names("model")
TOLD = {  # what is required by name
    "boxed_point": {"start": (1.0,) * 10},
    "gpt": {"num_tokens": 5},
    "multi_head": {"heads": (4, 6)},
    "point": {"start": (1.0,) * 10},
}
IMAGES = [name for name in NAMES if name not in {*TOLD, "siamese", "autoencoder"}]
FEATURES = {"with_features": 8}  # columns beside the outputs
SHAPES = {"gpt": (8,), "siamese": (2, 1, 8, 8)}  # what is not one image of 8 x 8
SEQUENCES = ["gru", "lstm", "rnn"]


def fields_of(stem) -> dict:
    content = OmegaConf.to_container(OmegaConf.load(papers.config_path("model", stem)))
    assert isinstance(content, dict)
    return content


def made(stem, shape, num_outputs, **options):
    """The model of a yaml, with its fields and `options` over them."""
    fields = fields_of(stem) | options
    factory = get_object(fields.pop("_target_"))
    fields.pop("_partial_", None)
    return factory(shape, num_outputs, **fields)


def assert_learns(model, inputs, shape):
    outputs = model(inputs)
    assert outputs.shape == shape
    (outputs - 1).square().sum().backward()  # weights may be zero at first
    for path, param in model.named_parameters():
        assert param.grad is not None, path
        assert param.grad.abs().sum() > 0, path


def test_every_model_has_a_yaml_of_its_name():
    assert NAMES
    for name in NAMES:
        kind, fields = papers.find("model", name), fields_of(name)
        assert fields["_target_"] == f"{kind.__module__}.{kind.__name__}"


@pytest.mark.parametrize("name", NAMES)
def test_yaml_and_defaults_are_the_same_model(name):
    shape, said = SHAPES.get(name, (1, 8, 8)), TOLD.get(name, {})
    num_outputs = 8 if name == "siamese" else 10
    torch.manual_seed(0)
    written = made(name, shape, num_outputs, **said)
    torch.manual_seed(0)
    default = papers.find("model", name)(shape, num_outputs, **said)
    assert str(written) == str(default)
    for a, b in zip(written.parameters(), default.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 17, 32), (1, 9, 9)])
def test_output_has_a_row_an_example_and_every_parameter_a_gradient(name, shape):
    torch.manual_seed(0)
    options = {"patch": shape[1] % 8 or 8} if name == "vit" else {}
    model = made(name, shape, 7, **options)
    assert_learns(model, torch.randn(5, *shape), (5, 7 + FEATURES.get(name, 0)))


@pytest.mark.parametrize("stem", [*SEQUENCES, "gpt"])
@pytest.mark.parametrize("every_step", [False, True])
def test_a_sequence_of_tokens_has_an_output_or_one_for_every_step(stem, every_step):
    torch.manual_seed(0)
    model = made(stem, (6,), 7, num_tokens=3, every_step=every_step)
    assert_learns(model, torch.randint(3, (5, 6)), (5, 6, 7) if every_step else (5, 7))


@pytest.mark.parametrize("stem", SEQUENCES)
@pytest.mark.parametrize("shape", [(6,), (6, 2), (3, 6, 4)])
@pytest.mark.parametrize("unrolled", [False, True])
def test_a_recurrent_model_takes_numbers_vectors_and_the_rows_of_images(stem, shape, unrolled):
    torch.manual_seed(0)
    model = made(stem, shape, 7, every_step=True, num_layers=2, unrolled=unrolled)
    assert_learns(model, torch.randn(5, *shape), (5, 6, 7))


@pytest.mark.parametrize("stem", [*SEQUENCES, "gpt"])
def test_an_output_of_a_step_depends_on_no_later_steps(stem):
    torch.manual_seed(0)
    model = made(stem, (6,), 7, num_tokens=5, every_step=True, num_layers=2)
    tokens = torch.randint(4, (3, 6))
    changed = tokens.clone()
    changed[:, 3] = 4
    same = (model(tokens) == model(changed)).all(dim=2).all(dim=0)
    assert same.tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("stem", [*SEQUENCES, "gpt"])
def test_the_output_is_that_of_the_last_step(stem):
    torch.manual_seed(0)
    last = made(stem, (6,), 7, num_tokens=5)
    every = made(stem, (6,), 7, num_tokens=5, every_step=True)
    every.load_state_dict(last.state_dict())
    tokens = torch.randint(5, (3, 6))
    torch.testing.assert_close(last(tokens), every(tokens)[:, -1])


@pytest.mark.parametrize(
    ("stem", "expected"),
    [
        ("mlp", ["hidden.0.relu", "hidden.1.relu"]),
        ("convnet", ["blocks.0.relu", "blocks.1.relu"]),
        (
            "resnet",
            ["relu"] + [f"stages.{stage}.0.relu{i}" for stage in (0, 1, 2) for i in (1, 2)],
        ),
    ],
)
def test_activations_are_modules(stem, expected):
    model = made(stem, (1, 8, 8), 10)
    assert expected == [path for path, part in model.named_modules() if isinstance(part, nn.ReLU)]


def test_mlp_matches_its_formula():
    torch.manual_seed(0)
    model = MLP((2, 3), 4, hidden=[5], activation="tanh")
    inputs = torch.randn(7, 2, 3)
    first, first_bias, last, last_bias = model.parameters()
    expected = torch.tanh(inputs.reshape(7, 6) @ first.T + first_bias) @ last.T + last_bias
    torch.testing.assert_close(model(inputs), expected)


def test_mlp_is_initialized_by_init():
    def parameters(**options):
        torch.manual_seed(0)
        return torch.cat([p.detach().flatten() for p in MLP((64,), 16, **options).parameters()])

    assert parameters(init="zero").count_nonzero() == 0
    assert parameters(init="normal", init_std=0.3).std().item() == pytest.approx(0.3, rel=0.05)
    torch.manual_seed(0)
    model = MLP((64,), 16, hidden=(32,), init="fan_out")
    for linear in (model.hidden[0].linear, model.output):
        for parameter in linear.parameters():
            bound = len(linear.bias) ** -0.5
            assert 0.8 * bound < parameter.abs().max() <= bound


def test_a_separate_bias_is_added_in_a_separate_operation():
    inputs = torch.randn(5, 8)
    found = []
    for separate in (False, True):
        torch.manual_seed(0)
        found.append(MLP((8,), 3, hidden=(), separate_bias=separate)(inputs))
    torch.testing.assert_close(*found)
    whole, apart = (outputs.grad_fn for outputs in found)
    assert whole.name() == "AddmmBackward0"
    assert (apart.name(), apart.next_functions[0][0].name()) == ("AddBackward0", "MmBackward0")


def test_mlp_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = MLP((8,), 2, hidden=(64,), dropout=0.5)
    inputs = torch.ones(1, 8)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_convnet_matches_its_formula():
    torch.manual_seed(0)
    model = Convnet((1, 4, 4), 3, channels=[2])
    images = torch.randn(5, 1, 4, 4)
    kernel, kernel_bias, last, last_bias = model.parameters()
    maps = torch.relu(nn.functional.conv2d(images, kernel, kernel_bias, padding=1))
    pooled = maps.reshape(5, 2, 2, 2, 2, 2).amax(dim=(3, 5))
    expected = pooled.mean(dim=(2, 3)) @ last.T + last_bias
    torch.testing.assert_close(model(images), expected)


def test_convnet_with_hidden_layers_sees_all_places():
    torch.manual_seed(0)
    model = Convnet((1, 5, 4), 3, channels=[2], kernel_size=5, hidden=[6])
    images = torch.randn(7, 1, 5, 4)
    kernel, kernel_bias, inner, inner_bias, last, last_bias = model.parameters()
    assert kernel.shape == (2, 1, 5, 5)
    maps = torch.relu(nn.functional.conv2d(images, kernel, kernel_bias, padding=2))
    pooled = maps[:, :, :4].reshape(7, 2, 2, 2, 2, 2).amax(dim=(3, 5))
    hidden = torch.relu(pooled.reshape(7, 8) @ inner.T + inner_bias)
    torch.testing.assert_close(model(images), hidden @ last.T + last_bias)
    names = {name for name, _ in model.named_modules()}
    assert {"flatten", "hidden.0.fc", "hidden.0.relu", "blocks.0.conv", "output"} < names
    assert "mean" not in names


def test_resnet_has_the_size_of_the_paper():
    """0.27 M parameters at depth 20 and width 16 for CIFAR-10 (table 6)."""
    sizes = [sum(p.numel() for p in ResNet((3, 32, 32), 10, depth=d).parameters()) for d in (8, 20)]
    assert sizes == [75290, 269722]


def test_resnet_blocks_with_silent_convolutions_pass_on_every_other_pixel():
    model = ResNet((1, 4, 4), 2, width=1).eval()
    for path, param in model.stages.named_parameters():
        if "norm2" in path:
            nn.init.zeros_(param)
    maps = torch.rand(1, 1, 4, 4)
    out = model.stages(maps)
    assert out.shape == (1, 4, 1, 1)
    assert out.flatten().tolist() == [maps[0, 0, 0, 0].item(), 0, 0, 0]


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_unrolled_is_the_same_function_of_the_same_random_numbers(cell):
    torch.manual_seed(0)
    fused = RNN((6, 2), 3, cell=cell, width=5, num_layers=2)
    torch.manual_seed(0)
    unrolled = RNN((6, 2), 3, cell=cell, width=5, num_layers=2, unrolled=True)
    for a, b in zip(fused.parameters(), unrolled.parameters(), strict=True):
        assert torch.equal(a, b)
    inputs = torch.randn(4, 6, 2)
    torch.testing.assert_close(unrolled(inputs), fused(inputs))


def test_a_plain_rnn_matches_its_formula():
    torch.manual_seed(0)
    model = RNN((2,), 1, width=3)
    into, around, into_bias, around_bias, last, last_bias = model.parameters()
    numbers, state = torch.randn(4, 2), torch.zeros(4, 3)
    for step in numbers.T:
        state = torch.tanh(step[:, None] @ into.T + into_bias + state @ around.T + around_bias)
    torch.testing.assert_close(model(numbers), state @ last.T + last_bias)


def test_tokens_can_go_in_as_rows_of_the_identity():
    torch.manual_seed(0)
    model = RNN((2,), 1, num_tokens=4, width=3, one_hot=True)
    into, around, into_bias, around_bias, last, last_bias = model.parameters()
    first = torch.tanh(into[:, 2] + into_bias + around_bias)
    state = torch.tanh(into[:, 0] + into_bias + first @ around.T + around_bias)
    outputs = model(torch.tensor([[2, 0]]))
    torch.testing.assert_close(outputs[0], state @ last.T + last_bias)
    assert model.double()(torch.tensor([[2, 0]])).dtype == torch.float64


@pytest.mark.parametrize("unrolled", [False, True])
def test_a_recurrent_model_is_initialized_by_init(unrolled):
    def weights(init):
        torch.manual_seed(0)
        model = RNN((9,), 40, num_tokens=40, width=50, unrolled=unrolled, one_hot=True, init=init)
        into, around, into_bias, around_bias, last, last_bias = model.parameters()
        for bias in (into_bias, around_bias, last_bias):
            assert bias.count_nonzero() == 0
        return into, around, last

    for weight in weights("basic_tanh"):
        assert weight.std().item() == pytest.approx(0.1, rel=0.05)
    into, around, last = weights("smart_tanh")
    for weight in (into, last):
        assert weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert (around.count_nonzero(dim=0) == 15).all()  # of the weights that go out of a unit
    assert around.count_nonzero(dim=1).unique().numel() > 1
    assert torch.linalg.eigvals(around).abs().max().item() == pytest.approx(0.95, rel=1e-5)


def test_an_image_is_read_row_by_row():
    model = RNN((2, 3, 4), 1)
    image = torch.arange(24.0).view(1, 2, 3, 4)
    assert model.embed(image)[0, 1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]


def test_attention_matches_its_formula():
    torch.manual_seed(0)
    attention = Attention(4, num_heads=2, causal=True)
    stream = torch.randn(1, 3, 4)
    queries, keys, values = attention.qkv(stream)[0].split(4, dim=1)
    mixed = torch.zeros(3, 4)
    for head in (slice(0, 2), slice(2, 4)):
        for time in range(3):
            scores = keys[: time + 1, head] @ queries[time, head] / 2**0.5
            mixed[time, head] = scores.softmax(0) @ values[: time + 1, head]
    torch.testing.assert_close(attention(stream)[0], attention.output(mixed))


def test_a_tied_gpt_reads_out_with_its_embedding_and_an_untied_one_does_not():
    tied, untied = (GPT((4,), 5, num_tokens=5, tied=tied) for tied in (True, False))
    assert tied.output.weight is tied.tokens.weight
    assert untied.output.weight is not untied.tokens.weight
    assert sum(p.numel() for p in untied.parameters()) == 5 * 64 + sum(
        p.numel() for p in tied.parameters()
    )


@pytest.mark.parametrize(("asked", "std"), [(None, 0.1), (1.0, 1.0)])
def test_the_embeddings_of_a_gpt_start_with_the_deviation_asked_for(asked, std):
    torch.manual_seed(0)
    model = GPT((50,), 2, num_tokens=50, width=100, embedding_std=asked)
    for table in (model.tokens, model.positions):
        assert table.weight.std().item() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize(("readout", "length"), [("token", 5), ("mean", 4)])
def test_vit_has_a_position_for_every_patch_and_for_the_class_token(readout, length):
    torch.manual_seed(0)
    model = ViT((1, 8, 8), 3, readout=readout)
    assert model.positions.shape == (length, 64)
    assert (model.token is not None) == (readout == "token")
    assert_learns(model, torch.randn(2, 1, 8, 8), (2, 3))


def silenced(model):
    """With blocks that add nothing to the stream."""
    for path, param in model.blocks.named_parameters():
        if "attention.output" in path or "mlp.down" in path:
            nn.init.zeros_(param)
    return model


def test_vit_without_blocks_worth_anything_is_linear_in_the_mean_patch():
    torch.manual_seed(0)
    model = silenced(ViT((1, 4, 4), 3, patch=2, readout="mean"))
    image = torch.randn(1, 1, 4, 4)
    corners = [image[0, 0, y : y + 2, x : x + 2] for y in (0, 2) for x in (0, 2)]
    kernel, bias = model.patches.parameters()
    patches = torch.stack([(kernel * corner).sum(dim=(1, 2, 3)) + bias for corner in corners])
    expected = model.output(model.norm(patches + model.positions).mean(dim=0))
    torch.testing.assert_close(model(image)[0], expected)


@pytest.mark.parametrize(
    ("kind", "shape", "options", "faults"),
    [
        (MLP, (8,), {"hidden": [64, 0]}, [("hidden.1", "must be > 0, found 0")]),
        (MLP, (0,), {}, [("input_shape.0", "must be > 0, found 0")]),
        (
            MLP,
            (8,),
            {"activation": "rely", "dropout": -1},
            [
                ("activation", "must be one of 'relu', 'tanh' or 'gelu', found 'rely'"),
                ("dropout", "must be >= 0, found -1"),
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
        (Convnet, (1, 8, 8), {"kernel_size": 4}, [("kernel_size", "must be odd, found 4")]),
        (ResNet, (64,), {}, [("input_shape", "must be (channels, height, width), found (64,)")]),
        (
            ResNet,
            (1, 8, 8),
            {"depth": 10},
            [("depth", "must be 8, 14, 20 or so on, 6n + 2, found 10")],
        ),
        (
            ViT,
            (1, 8, 6),
            {},
            [("patch", "must divide an image of 8 x 6, found 4")],
        ),
        (
            ViT,
            (1, 8, 8),
            {"num_heads": 3},
            [("num_heads", "must divide a width of 64, found 3")],
        ),
        (
            RNN,
            (8,),
            {"cell": "gruu", "width": 0},
            [
                ("cell", "must be one of 'rnn', 'gru' or 'lstm', found 'gruu'"),
                ("width", "must be > 0, such as 64, found 0"),
            ],
        ),
        (RNN, (8,), {"one_hot": True}, [("one_hot", "needs tokens, and the inputs are numbers")]),
        (
            RNN,
            (8,),
            {"cell": "gru", "init": "smart_tanh"},
            [("init", "must be torch with cell=gru, found smart_tanh")],
        ),
        (
            RNN,
            (4, 2),
            {"num_tokens": 3},
            [("input_shape", "must be (time,), found (4, 2)")],
        ),
        (
            MultiHead,
            (8,),
            {"heads": (1, 2)},
            [("heads", "must be 2 outputs together, found (1, 2)")],
        ),
        (Point, (2,), {"start": (1,)}, [("start", "must have 2 coordinates, found 1")]),
        (GPT, (4, 2), {"num_tokens": 3}, [("input_shape", "must be (time,), found (4, 2)")]),
        (
            GPT,
            (4,),
            {"num_tokens": 3, "num_heads": 5},
            [("num_heads", "must divide a width of 64, found 5")],
        ),
        (
            GPT,
            (4,),
            {"num_tokens": 3, "tied": True},
            [("tied", "needs an output for each of the 3 tokens, and the task has 2")],
        ),
    ],
)
def test_bad_values_are_refused_by_name(kind, shape, options, faults):
    with pytest.raises(FieldError) as caught:
        kind(shape, 2, **options)
    assert caught.value.faults == faults


@pytest.mark.parametrize("trunk", ["mlp", "convnet"])
def test_the_outputs_of_a_head_depend_on_that_head_alone(trunk):
    torch.manual_seed(0)
    model = MultiHead((1, 8, 8), 5, heads=(2, 3), trunk=trunk)
    images = torch.randn(4, 1, 8, 8)
    first, second = model(images)
    assert (first.shape, second.shape) == ((4, 2), (4, 3))
    reached = [
        {name for name, param in model.named_parameters() if grad_of(loss, param) is not None}
        for loss in (first.square().sum(), second.square().sum())
    ]
    everything = {name for name, _ in model.named_parameters()}
    assert everything - reached[0] == {"heads.1.weight", "heads.1.bias"}
    assert everything - reached[1] == {"heads.0.weight", "heads.0.bias"}


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_the_features_of_the_heads_have_the_activation_that_is_asked_for(activation):
    torch.manual_seed(0)
    model = MultiHead((2,), 4, heads=(2, 2), width=3, hidden=(), activation=activation)
    inputs = torch.randn(5, 2)
    weight, bias, *heads = model.parameters()
    features = getattr(torch, activation)(inputs @ weight.T + bias)
    assert activation in dict(model.named_children())
    for found, (head, head_bias) in zip(model(inputs), (heads[:2], heads[2:]), strict=True):
        torch.testing.assert_close(found, features @ head.T + head_bias)


def grad_of(loss, param):
    return torch.autograd.grad(loss, param, retain_graph=True, allow_unused=True)[0]


def test_the_outputs_of_a_point_are_its_coordinates_for_every_input():
    model = Point((3,), 2, start=(1.5, -2.0))
    assert model(torch.randn(4, 3)).tolist() == [[1.5, -2.0]] * 4
    assert torch.autograd.grad(model(torch.randn(4, 3)).sum(), model.point)[0].tolist() == [
        4.0,
        4.0,
    ]
