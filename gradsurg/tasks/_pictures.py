"""Where a task that is about any images takes them from."""

from gradsurg.plugins.fields import Contradiction
from gradsurg.tasks.base import Task
from gradsurg.tasks.digits import Digits
from gradsurg.tasks.fashion_mnist import FashionMNIST
from gradsurg.tasks.mnist import MNIST

FILES = {"mnist": MNIST, "fashion_mnist": FashionMNIST}


def pictures(data: str, root: str | None, num_train: int | None, num_test: int | None) -> Task:
    """The task whose images they are. Raises FieldError for what digits, which need no files, do
    not take.
    """
    if data in FILES:
        return FILES[data](root, num_train, num_test)
    for name, found in (("root", root), ("num_train", num_train), ("num_test", num_test)):
        if found is not None:
            raise Contradiction(name, f"must be null with data={data}, found {found!r}")
    return Digits()
