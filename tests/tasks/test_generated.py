"""Generated tasks: examples worked out by hand, and the data that no change may change."""

from hashlib import sha256
from math import log

import numpy as np
import pytest
import torch
from gradsurg.experiments.ganin2015.task import TwoMoonsShift
from sklearn.datasets import load_digits

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks.base import Data
from gradsurg.tasks.char_lm import CharLM
from gradsurg.tasks.diabetes import Diabetes
from gradsurg.tasks.modular import Modular
from gradsurg.tasks.overlay import Overlay
from gradsurg.tasks.temporal_order import SYMBOLS, TemporalOrder
from tests import papers

SMALL = {"num_train": 20, "num_test": 20}


def fingerprint(data: Data) -> str:
    digest = sha256()
    for tensor in (data.train_inputs, data.train_targets, data.test_inputs, data.test_targets):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


# Runs are compared across machines and years: whoever changes one of these breaks that, and
# says so in CHANGELOG.md.
PINNED = [
    (Diabetes(), "3ba82474862adabe"),
    (Modular(), "cd4d04f7a6a3e5ec"),
    (Overlay(), "e999f3382573de45"),
    (TemporalOrder(), "82c8c303c7717362"),
    (TwoMoonsShift(), "d4e5412385bf3eb9"),
]


@pytest.mark.parametrize(("task", "expected"), PINNED, ids=lambda item: type(item).__name__)
def test_the_data_match_their_pinned_hashes(task, expected):
    assert fingerprint(task.load()) == expected


@pytest.mark.parametrize("kind", [Overlay, TemporalOrder])
def test_data_depends_on_its_seed_and_the_test_not_on_how_much_is_for_training(kind):
    data, other = kind(**SMALL).load(), kind(**SMALL, data_seed=1).load()
    assert not torch.equal(data.train_inputs, other.train_inputs)
    assert not torch.equal(data.test_inputs, other.test_inputs)
    assert not torch.equal(data.train_inputs, data.test_inputs)
    longer = kind(num_train=40, num_test=20).load()
    # Some are standardised by their training part, which moves and scales the test as a whole.
    tests = [one.test_inputs.double() for one in (data, longer)]
    a, b = ((test - test.mean()) / test.std() for test in tests)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert len(longer.train_inputs) == 40


@pytest.mark.parametrize("kind", [Diabetes, Modular, Overlay])
def test_data_depends_on_the_seed_of_its_split(kind):
    data, other = kind().load(), kind(split_seed=1).load()
    assert not torch.equal(data.train_targets, other.train_targets)


def test_modular_can_have_a_token_for_the_operation():
    plain = Modular(modulus=5, operation="multiply").load()
    data = Modular(modulus=5, operation="multiply", operator_token=True).load()
    assert (data.input_shape, data.num_tokens) == ((4,), 7)
    for tokens in (data.train_inputs, data.test_inputs):
        assert tokens[:, [1, 3]].unique(dim=0).tolist() == [[6, 5]]
    assert torch.equal(data.train_inputs[:, [0, 2, 3]], plain.train_inputs)
    assert torch.equal(data.train_targets, plain.train_targets)


def test_temporal_order_asks_for_the_order_of_x_and_y():
    data = TemporalOrder(length=20, num_train=4, num_test=2).load()
    said = ["".join(SYMBOLS[token] for token in example) for example in data.train_inputs]
    assert said == [
        "EccYbaaaadYdccdccccB",
        "EdXabdcadcXaadacabbB",
        "EaYaacccbcdYbdddbcdB",
        "EccYdaccdcbXbbcdadcB",
    ]
    assert data.train_targets.tolist() == [3, 0, 3, 2]  # YY, XX, YY, YX


@pytest.mark.parametrize(
    ("operation", "table"),
    [
        ("add", [[0, 1, 2], [1, 2, 0], [2, 0, 1]]),
        ("subtract", [[0, 2, 1], [1, 0, 2], [2, 1, 0]]),
        ("multiply", [[0, 0, 0], [0, 1, 2], [0, 2, 1]]),
    ],
)
def test_modular_holds_every_entry_of_the_table_once(operation, table):
    data = Modular(modulus=3, operation=operation, train_fraction=0.3).load()
    assert len(data.train_inputs) == 3
    found = {}
    for inputs, targets in (
        (data.train_inputs, data.train_targets),
        (data.test_inputs, data.test_targets),
    ):
        for (a, b, equals), result in zip(inputs.tolist(), targets.tolist(), strict=True):
            assert equals == 3
            assert (a, b) not in found
            found[a, b] = result
    assert found == {(a, b): table[a][b] for a in range(3) for b in range(3)}


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_modular_refuses_an_empty_part(fraction):
    with pytest.raises(FieldError) as caught:
        Modular(modulus=3, train_fraction=fraction)
    rule = f"leaves a part of the 9 entries empty, found {fraction}"
    assert caught.value.faults == [("train_fraction", rule)]


def test_overlay_of_digits_that_do_not_touch_holds_both_as_they_are():
    data = Overlay(**SMALL, shift=8).load()
    assert data.input_shape == (1, 16, 16)
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    image, targets = data.train_inputs[0, 0], data.train_targets[0]
    assert (image[8:, :8] == image[0, 15]).all()  # nothing lies there
    for corner, target in ((image[:8, :8], targets[0]), (image[8:, 8:], targets[1])):
        shape = (corner - corner.min()) / (corner.max() - corner.min()) * 16
        distances = np.abs(pixels - shape.flatten().numpy()).max(axis=1)
        assert distances.min() < 1e-3
        assert labels[distances.argmin()] == target


def test_overlay_shows_the_brighter_pixel():
    whole, apart = Overlay(**SMALL, shift=0).load(), Overlay(**SMALL, shift=8).load()
    assert torch.equal(whole.train_targets, apart.train_targets)
    first, second = apart.train_inputs[:, :, :8, :8], apart.train_inputs[:, :, 8:, 8:]
    brighter = torch.maximum(first, second)
    # Both are standardised, each by its own mean and deviation.
    torch.testing.assert_close(
        (brighter - brighter.mean()) / brighter.std(correction=0), whole.train_inputs
    )


def test_overlay_loss_and_metrics_match_a_calculation_by_hand():
    outputs = torch.zeros(2, 20)
    outputs[0, 3] = outputs[0, 10 + 7] = 50  # sure of a 3 and a 7
    metrics = Overlay().metrics(outputs, torch.tensor([[3, 7], [0, 4]]))
    assert metrics == {
        # The second example is undecided, and argmax says 0 for it.
        "loss": pytest.approx(log(10)),
        "loss_first": pytest.approx(log(10) / 2),
        "loss_second": pytest.approx(log(10) / 2),
        "accuracy": 0.75,
        "accuracy_first": 1.0,
        "accuracy_second": 0.5,
    }


def test_char_lm_asks_for_the_next_character(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcbabcbz!" + "abz", encoding="utf-8")
    data = CharLM(path=str(path), length=2, test_fraction=3 / 13).load()
    # Training has "!abcz", numbered 1 to 5; the z of the test is known to it.
    assert data.train_inputs.tolist() == [[2, 3], [4, 3], [2, 3], [4, 3]]
    assert data.train_targets.tolist() == [[3, 4], [3, 2], [3, 4], [3, 5]]
    assert data.test_inputs.tolist() == [[2, 3]]
    assert data.test_targets.tolist() == [[3, 5]]
    assert (data.num_tokens, data.num_outputs, data.every_step) == (6, 6, True)


def test_char_lm_has_a_token_for_characters_that_are_not_in_training(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abababab" + "aÄb", encoding="utf-8")
    data = CharLM(path=str(path), length=2, test_fraction=3 / 11).load()
    assert data.test_inputs.tolist() == [[1, 0]]
    assert data.num_tokens == 3


def test_char_lm_reads_the_help_of_python_by_default():
    data = CharLM().load()
    assert data.train_inputs.numel() == pytest.approx(180_000, abs=64)
    assert data.test_inputs.numel() == pytest.approx(20_000, abs=64)
    assert 80 < data.num_outputs < 200


def test_char_lm_refuses_a_missing_binary_or_short_file(tmp_path):
    with pytest.raises(FieldError) as caught:
        CharLM(path="/no/such")
    assert caught.value.faults == [("path", "must be a file, found '/no/such'")]
    path = tmp_path / "text"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FieldError, match=r"CharLM.path: cannot be read: 'utf-8' codec"):
        CharLM(path=str(path)).load()
    short = tmp_path / "short"
    short.write_text("a" * 100, encoding="utf-8")
    rule = "must be < 10, the characters of its smaller part, found 10"
    with pytest.raises(FieldError) as caught:
        CharLM(path=str(short), length=10).load()
    assert caught.value.faults == [("length", rule)]


@pytest.mark.parametrize(
    ("kind", "options", "fault"),
    [
        (Modular, {"modulus": 1}, ("modulus", "must be >= 2, found 1")),
        (
            Modular,
            {"operation": "divide"},
            ("operation", "must be one of 'add', 'subtract' or 'multiply', found 'divide'"),
        ),
        (Overlay, {"shift": 9}, ("shift", "must be <= 8, found 9")),
        (Diabetes, {"split_seed": -1}, ("split_seed", "must be >= 0, found -1")),
    ],
)
def test_bad_values_are_refused_by_name(kind, options, fault):
    with pytest.raises(FieldError) as caught:
        kind(**options)
    assert caught.value.faults == [fault]


# Sums of the entries of training inputs, training targets, test inputs and test targets, weighted
# by their places. A change here is a change of every result that was trained on the task.
GOLDEN = {
    "diabetes": (94.04027, 0.09599211, 91.22086, -9.918683),
    "digits": (-305.5775, 2982.983, 146.9693, 1011.267),
    "long_tail": (-215.593, 41121.63, -215.593, 41121.63),
    "modular": (453649.1, 113361.8, 457738.6, 114197.6),
    "overlay": (308.6535, 35913.04, -116.0751, 4559.767),
    "rare_slope": (2048, -5249.407, 2048, -5249.407),
    "temporal_order": (122067.8, 2860.6, 30541.8, 788.4715),
    "two_moons_shift": (80.15849, 506.5628, 542.2206, 3375.313),
    "two_views": (14558.35, 2982.983, 5760.937, 1011.267),
    "wilson": (244.1706, 0.6060606, 240.1777, 8.787879),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_examples_are_those_of_all_earlier_results(name):
    data = papers.find("task", name)().load()
    found = []
    for tensor in (*data.part("train"), *data.part("test")):
        entries = tensor.double().flatten()
        found.append((entries @ torch.linspace(-1, 2, len(entries), dtype=torch.float64)).item())
    assert found == pytest.approx(GOLDEN[name], rel=1e-5, abs=1e-3)
