"""Tasks of image and text files: every layout, and errors for broken files."""

import hashlib
import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from gradsurg.experiments.chaudhry2019.task import PermutedMNIST

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks import cifar10, fashion_mnist, mnist
from gradsurg.tasks.char_lm import CharLM
from gradsurg.tasks.cifar10 import CIFAR10
from gradsurg.tasks.data.images import IDX_NAMES, read_images
from gradsurg.tasks.fashion_mnist import FashionMNIST
from gradsurg.tasks.mnist import MNIST
from gradsurg.tasks.mnist_overlay import MNISTOverlay
from tests.image_files import ARRAYS, TEST, TEST_LABELS, TRAIN, TRAIN_LABELS, idx, named, write


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    """The same folder holds other files in the next test."""
    read_images.cache_clear()
    cifar10._read.cache_clear()


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
@pytest.mark.parametrize("place", [".", "raw", "own", "own/raw"])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_are_read_where_they_may_lie(tmp_path, kind, place, zipped):
    write(tmp_path / place.replace("own", kind.__name__), zipped)
    data = kind(root=str(tmp_path), verify=False).load()
    assert data.input_shape == (1, 28, 28)
    assert data.train_targets.tolist() == TRAIN_LABELS.tolist()
    assert data.test_targets.tolist() == TEST_LABELS.tolist()
    mean, deviation = TRAIN.mean(), TRAIN.std()
    for found, images in ((data.train_inputs, TRAIN), (data.test_inputs, TEST)):
        expected = (images.astype(float) - mean) / deviation
        np.testing.assert_allclose(found[:, 0].numpy(), expected, atol=1e-5)


def test_an_npz_file_is_read(tmp_path):
    np.savez(tmp_path / "mnist.npz", **named())
    data = MNIST(root=str(tmp_path), verify=False).load()
    write(tmp_path / "raw")
    (tmp_path / "mnist.npz").unlink()
    read_images.cache_clear()
    same = MNIST(root=str(tmp_path), verify=False).load()
    assert torch.equal(data.train_inputs, same.train_inputs)
    assert torch.equal(data.test_targets, same.test_targets)


@pytest.mark.parametrize("layout", ["idx", "zipped", "npz"])
@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_files_of_every_layout_are_checked_by_one_set_of_hashes(tmp_path, layout, algorithm):
    digests = [getattr(hashlib, algorithm)(idx(array)).hexdigest() for array in ARRAYS.values()]
    known = replace(mnist.LAYOUT, algorithm=algorithm, hashes=tuple(digests))
    if layout == "npz":
        np.savez(tmp_path / "mnist.npz", **named())
    else:
        write(tmp_path, zipped=layout == "zipped")
    assert read_images(known, str(tmp_path), verify=True).train_labels.tolist() == list(
        TRAIN_LABELS
    )
    other = replace(known, hashes=(*digests[:3], digests[0]))
    with pytest.raises(FieldError, match=f"t10k-labels-idx1-ubyte has another {algorithm}"):
        read_images(other, str(tmp_path), verify=True)


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_other_files_than_the_known_ones_are_refused(tmp_path, kind):
    root = write(tmp_path)
    with pytest.raises(FieldError, match="train-images-idx3-ubyte has another (sha256|md5)"):
        kind(root=root).load()


def test_the_published_hashes_have_the_length_of_their_algorithm():
    assert [len(text) for text in mnist.LAYOUT.hashes] == [64] * 4
    assert [len(text) for text in fashion_mnist.LAYOUT.hashes] == [32] * 4
    assert [len(text) for text in cifar10.HASHES.values()] == [64] * 6
    for hashes in (mnist.LAYOUT.hashes, fashion_mnist.LAYOUT.hashes, cifar10.HASHES.values()):
        assert len({*hashes}) == len(hashes)
        assert all(int(text, 16) for text in hashes)


def test_two_of_mnists_digits_lie_over_each_other(tmp_path):
    write(tmp_path)
    task = MNISTOverlay(root=str(tmp_path), verify=False, num_train=30, num_test=7, shift=28)
    data = task.load()
    assert data.input_shape == (1, 56, 56)
    assert (len(data.train_inputs), len(data.test_inputs)) == (30, 7)
    pixels = data.train_inputs[:, 0].numpy()
    dark, bright = pixels[:, 28:, :28].max(), pixels.max()  # nothing lies there; 255 is somewhere
    pixels = np.round((pixels - dark) / (bright - dark) * TRAIN.max()).astype(int)
    for image, targets in zip(pixels, data.train_targets.tolist(), strict=True):
        for corner, target in ((image[:28, :28], targets[0]), (image[28:, 28:], targets[1])):
            (place,) = np.flatnonzero((corner == TRAIN).all(axis=(1, 2)))
            assert TRAIN_LABELS[place] == target
    assert data.heads == (10, 10)
    write(tmp_path, train_labels_idx1_ubyte=idx(9 - TRAIN_LABELS))  # other files are read anew
    assert torch.equal(task.load().train_targets, 9 - data.train_targets)
    with pytest.raises(FieldError, match="train-images-idx3-ubyte has another sha256"):
        MNISTOverlay(root=str(tmp_path)).load()


@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        (MNIST, "MNIST is not in '{}/mnist': 'python -m gradsurg.tasks.fetch mnist' puts it"),
        (MNISTOverlay, "MNIST is not in '{}/mnist': 'python -m gradsurg.tasks.fetch mnist' puts"),
        (PermutedMNIST, "MNIST is not in '{}/mnist': 'python -m gradsurg.tasks.fetch mnist' puts"),
        (FashionMNIST, "Fashion-MNIST is not in '{}/fashion-mnist': 'python -m gradsurg.tasks.f"),
        (CIFAR10, "is required, the folder with "),
    ],
)
def test_a_missing_folder_is_an_error_with_its_files_and_their_source(
    tmp_path, cache, kind, begins
):
    with pytest.raises(FieldError) as caught:
        kind().load()
    ((field, said),) = caught.value.faults
    assert field == "root"
    assert said.startswith(begins.format(cache))
    assert "http" in said
    assert "\n" not in said
    with pytest.raises(FieldError, match="there is no folder '/no/such'"):
        kind(root="/no/such").load()
    with pytest.raises(FieldError, match="there is no (train-images-idx3-ubyte|data_batch_1) in"):
        kind(root=str(tmp_path)).load()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train_images_idx3_ubyte": b""}, "it is not an IDX file of bytes"),
        ({"train_images_idx3_ubyte": b"\0\0\x08\x03\0"}, "it is not an IDX file of bytes"),
        ({"train_images_idx3_ubyte": b"\0\0\x0d\x03" + bytes(12)}, "not an IDX file of bytes"),
        ({"train_images_idx3_ubyte": idx(TRAIN)[:-1]}, "cannot reshape array of size 9407"),
        ({"train_labels_idx1_ubyte": idx(TRAIN_LABELS[:5])}, "shapes [12, 28, 28] and [5]"),
        ({"t10k_images_idx3_ubyte": idx(TEST_LABELS)}, "have the shapes [12] and [12]"),
        ({"t10k_labels_idx1_ubyte": idx(np.full(12, 10, np.uint8))}, "a label is 10"),
    ],
)
def test_a_broken_idx_file_is_an_error(tmp_path, changed, said):
    root = write(tmp_path, **changed)
    with pytest.raises(FieldError) as caught:
        MNIST(root=root, verify=False).load()
    assert said in str(caught.value)
    assert "https://" in str(caught.value)


def test_a_broken_zip_is_an_error(tmp_path):
    root = write(tmp_path, zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FieldError, match="train-images-idx3-ubyte.gz cannot be read"):
        MNIST(root=root, verify=False).load()
    path.write_bytes(b"no zip")
    with pytest.raises(FieldError, match="train-images-idx3-ubyte.gz cannot be read"):
        MNIST(root=root, verify=False).load()


def test_an_npz_that_is_an_array_or_damaged_inside_is_an_error(tmp_path):
    path = tmp_path / "mnist.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3, np.uint8))
    with pytest.raises(FieldError, match="mnist.npz cannot be read"):
        MNIST(root=str(tmp_path), verify=False).load()
    np.savez_compressed(path, **named())
    content = bytearray(path.read_bytes())
    start = content.index(b"x_train.npy") + 11
    content[start : start + 60] = bytes(60)
    path.write_bytes(content)
    with pytest.raises(FieldError, match="mnist.npz cannot be read"):
        MNIST(root=str(tmp_path), verify=False).load()


def test_an_npz_of_objects_is_not_unpickled(tmp_path):
    arrays = dict.fromkeys(IDX_NAMES.values(), np.array([Trap()], dtype=object))
    np.savez(tmp_path / "mnist.npz", **arrays)
    with pytest.raises(FieldError, match="mnist.npz cannot be read"):
        MNIST(root=str(tmp_path), verify=False).load()
    assert not Trap.sprung


def test_so_many_examples_are_chosen_by_the_seed(tmp_path):
    root = write(tmp_path)
    every = MNIST(root=root, verify=False).load()
    some, other = (
        MNIST(root=root, verify=False, num_train=5, num_test=3, split_seed=seed).load()
        for seed in (0, 1)
    )
    assert (len(some.train_inputs), len(some.test_inputs)) == (5, 3)
    assert not torch.equal(some.train_targets, other.train_targets)
    order = [
        every.train_inputs.flatten(1).argmax(1).tolist().index(place)
        for place in some.train_inputs.flatten(1).argmax(1).tolist()
    ]
    assert some.train_targets.tolist() == every.train_targets[order].tolist()
    assert abs(some.train_inputs.mean()) < 1e-5
    with pytest.raises(FieldError) as caught:
        MNIST(root=root, verify=False, num_test=13).load()
    assert caught.value.faults == [("num_test", "must be <= 12 examples, found 13")]


class Trap:
    """An object that a pickle must not make."""

    sprung = False

    def __reduce__(self):
        return _spring, ()


def _spring() -> None:
    Trap.sprung = True


def old_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A pickle of Python 2: {"data": an array, "labels": a list}, in protocol 2."""

    def string(text: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(text)) + text

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    make = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0)
    make += b"t" + string(b"b") + b"tR"
    kind = b"cnumpy\ndtype\n(" + string(b"u1") + number(0) + number(1) + b"tR"
    kind += b"(" + number(3) + string(b"|") + b"NNN" + number(-1) * 2 + number(0) + b"tb"
    shape = b"(" + number(pixels.shape[0]) + number(pixels.shape[1]) + b"t"
    state = b"(" + number(1) + shape + kind + b"\x89" + string(pixels.tobytes()) + b"tb"
    kinds = b"](" + b"".join(number(label) for label in labels) + b"e"
    items = string(b"data") + make + state + string(b"labels") + kinds
    return b"\x80\x02}(" + items + b"u."


def write_cifar(folder) -> np.ndarray:
    """Six batches of two images each; the images, in the order of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3072), dtype=np.uint8)
    for index, name in enumerate(cifar10.HASHES):
        first = 2 * index
        content = old_pickle(pixels[first : first + 2], [first % 10, (first + 1) % 10])
        (folder / name).write_bytes(content)
    return pixels


@pytest.mark.parametrize("place", [".", "cifar-10-batches-py"])
def test_cifar10_is_read_from_its_batches(tmp_path, place):
    pixels = write_cifar(tmp_path / place)
    data = CIFAR10(root=str(tmp_path), verify=False).load()
    assert data.input_shape == (3, 32, 32)
    assert data.train_targets.tolist() == list(range(10))
    assert data.test_targets.tolist() == [0, 1]
    # The first 1024 bytes are the reds, row by row.
    reds = pixels[:10, :1024].astype(float)
    expected = (float(pixels[11, 32 + 5]) - reds.mean()) / reds.std()
    assert data.test_inputs[1, 0, 1, 5].item() == pytest.approx(expected, abs=1e-5)
    assert data.train_inputs.mean(dim=(0, 2, 3)).abs().max() < 1e-5


def test_cifar10_checks_its_files(tmp_path, monkeypatch):
    write_cifar(tmp_path)
    with pytest.raises(FieldError, match="data_batch_1 has another sha256"):
        CIFAR10(root=str(tmp_path)).load()
    for name in cifar10.HASHES:
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        monkeypatch.setitem(cifar10.HASHES, name, digest)
    assert len(CIFAR10(root=str(tmp_path)).load().train_inputs) == 10


def test_cifar10_makes_arrays_and_nothing_else_of_a_pickle(tmp_path):
    write_cifar(tmp_path)
    content = pickle.dumps({"data": Trap(), "labels": [0]}, protocol=2)
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(FieldError, match=r"data_batch_2 cannot be read \(it asks for .*_spring\)"):
        CIFAR10(root=str(tmp_path), verify=False).load()
    assert not Trap.sprung
    pickle.loads(content)
    assert Trap.sprung
    Trap.sprung = False


PIXELS = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "data_batch_1 cannot be read"),
        (b"no pickle", "data_batch_1 cannot be read"),
        (pickle.dumps([1], protocol=2), "data_batch_1 cannot be read"),
        (pickle.dumps({"data": 1}, protocol=2), "data_batch_1 cannot be read"),
        (old_pickle(PIXELS[:, :3000], [1, 2]), "cannot reshape array of size 6000 into shape"),
        (old_pickle(PIXELS, [1]), "cannot reshape array of size 6144 into shape (1,3,32,32)"),
        (old_pickle(PIXELS, [1, 10]), "data_batch_1 has labels other than 0 to 9"),
        (old_pickle(PIXELS, [1, -1]), "data_batch_1 has labels other than 0 to 9"),
    ],
)
def test_a_broken_batch_is_an_error_of_one_line(tmp_path, content, said):
    write_cifar(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(FieldError) as caught:
        CIFAR10(root=str(tmp_path), verify=False).load()
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
@pytest.mark.parametrize("zipped", [False, True])
def test_other_files_have_another_content_and_are_read_anew(tmp_path, kind, zipped):
    task = kind(root=write(tmp_path, zipped), verify=False)
    before, labels = task.content, task.load().test_targets.tolist()
    assert task.content == before
    assert len(before) == 8
    write(tmp_path, zipped, t10k_labels_idx1_ubyte=idx(TEST_LABELS[::-1].copy()))
    assert task.content != before
    assert task.load().test_targets.tolist() == labels[::-1]


def test_an_edited_text_is_read_anew(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("abcd" * 100, encoding="utf-8")
    task = CharLM(path=str(file), length=8)
    before, data = task.content, task.load()
    file.write_text("abdc" * 100, encoding="utf-8")
    assert task.content != before
    assert not torch.equal(task.load().train_inputs, data.train_inputs)
    assert CharLM(length=8).content  # the text that comes with Python is another in another release
    file.unlink()
    with pytest.raises(FieldError, match=r"words\.txt cannot be read: No such file"):
        task.load()
