"""What a task promises: data, a loss to differentiate, and metrics to report."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Data:
    """What is learnt from and what is tested on, whole, with the first axis the examples."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    input_shape: tuple[int, ...]
    num_outputs: int


class Task(ABC):
    """A problem to train on."""

    @abstractmethod
    def load(self) -> Data:
        """The data: on the CPU, and the same at every call."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The number that is differentiated, as a tensor of no axes."""

    @abstractmethod
    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Numbers for evaluation, by name, `loss` among them; waits for the device."""
