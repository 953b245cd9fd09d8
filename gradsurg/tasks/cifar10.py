"""CIFAR-10: 60,000 photographs of 32 x 32 pixels in ten classes, from the user's files."""

import pickle
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import Count, Seed
from gradsurg.tasks.data.images import NUM_CLASSES, Images, image_folder, refusal

INNER = "cifar-10-batches-py"
HASHES = {
    "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
    "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
    "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
    "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
    "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
    "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
}
WHERE = (
    f"the folder with {INNER}, as https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz unpacks"
)
BROKEN = (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError)


@validated
class CIFAR10(Classification):
    """Classify photographs (Krizhevsky 2009) by cross-entropy; from files, nothing is downloaded.

    `root` is the folder of the batch files for Python, or its parent, in the layout that
    torchvision unpacks. They are pickles, read by an unpickler that creates numpy arrays only. With
    `verify` files that are not the published ones are refused. `num_train` and `num_test` are sizes
    of subsets chosen by `split_seed`; null means all examples.
    """

    root: str | None = None
    num_train: Count | None = None
    num_test: Count | None = None
    split_seed: Seed = 0
    verify: bool = True

    def load(self) -> Data:
        images = _read(self.root, self.verify, self.content)
        return images.data(self.num_train, self.num_test, self.split_seed)

    def files(self) -> Sequence[Path]:
        if self.verify:  # their content is fixed by the hashes
            return ()
        place = image_folder(self.root, WHERE)
        return [_file(place, name) for name in HASHES]


@lru_cache(maxsize=1)
def _read(root: str | None, verify: bool, content: str) -> Images:
    """Read the files; `content`, their hash, is part of the cache's key."""
    place = image_folder(root, WHERE)
    *train, test = (_batch(place, name, verify) for name in HASHES)
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return Images(images, labels, *test)


def _batch(place: Path, name: str, verify: bool) -> tuple[np.ndarray, np.ndarray]:
    content = _file(place, name).read_bytes()
    if verify and sha256(content).hexdigest() != HASHES[name]:
        raise refusal(place, f"{name} has another sha256 (verify=false takes it)", WHERE)
    try:
        held = _Arrays(BytesIO(content), encoding="bytes").load()
        labels = np.array(held[b"labels"], np.int64)
        # A plain reshape, whose message about missing bytes fits on one line.
        images = np.asarray(held[b"data"]).reshape(len(labels), 3, 32, 32)
    except BROKEN as error:
        raise refusal(place, f"{name} cannot be read ({error})", WHERE) from error
    if images.dtype != np.uint8:
        raise refusal(place, f"{name} holds other numbers than bytes", WHERE)
    if not len(labels) or not 0 <= labels.min() <= labels.max() < NUM_CLASSES:
        raise refusal(place, f"{name} has labels other than 0 to {NUM_CLASSES - 1}", WHERE)
    return images, labels


def _file(place: Path, name: str) -> Path:
    path = next((path for path in (place / INNER / name, place / name) if path.is_file()), None)
    if path is None:
        raise refusal(place, f"there is no {name}", WHERE)
    return path


class _Arrays(pickle.Unpickler):
    """An unpickler of numpy arrays that refuses all other classes."""

    def find_class(self, module_name: str, global_name: str) -> object:
        match module_name, global_name:
            case "numpy.core.multiarray", "_reconstruct":
                return np.empty(0).__reduce__()[0]  # it has moved in numpy 2
            case "numpy", "ndarray":
                return np.ndarray
            case "numpy", "dtype":
                return np.dtype
            case _:
                raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")
