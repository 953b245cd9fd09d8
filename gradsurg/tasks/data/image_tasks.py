"""Choose a classification task of images by name, for tasks that use its images otherwise."""

from gradsurg.plugins.fields import Contradiction
from gradsurg.tasks.base import Task
from gradsurg.tasks.digits import Digits
from gradsurg.tasks.fashion_mnist import FashionMNIST
from gradsurg.tasks.mnist import MNIST

FROM_FILES = {"mnist": MNIST, "fashion_mnist": FashionMNIST}


def image_task(data: str, root: str | None, num_train: int | None, num_test: int | None) -> Task:
    """Return the task `digits`, `mnist` or `fashion_mnist`.

    Raises FieldError for options that `digits`, which reads no files, does not have.
    """
    if data in FROM_FILES:
        return FROM_FILES[data](root, num_train, num_test)
    for name, value in (("root", root), ("num_train", num_train), ("num_test", num_test)):
        if value is not None:
            raise Contradiction(name, f"must be null with data={data}, found {value!r}")
    return Digits()
