"""MLPs whose hidden units, or whose weights, are -1 or 1, with a straight-through backward."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from math import prod

from gradsurg.experiments.schoenbauer2024.layers import SignLinear, StraightSign
from torch import Tensor, nn

from gradsurg.models.mlp import MLPOptions


class SignMLP(nn.Module):
    """Flatten, then linear layers with `StraightSign` between them.

    Its modules are `hidden.0.linear`, `hidden.0.sign`, ..., `output`. A transform at the inputs of
    the `sign` modules is the derivative that training uses for them (`gs.SurrogateGradient`).
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        hidden: Sequence[int] = (64, 64),
    ) -> None:
        super().__init__()
        options = MLPOptions(input_shape, num_outputs, hidden)
        widths = [prod(options.input_shape), *options.hidden]
        self.flatten = nn.Flatten()
        self.hidden = nn.Sequential(
            *(
                nn.Sequential(
                    OrderedDict[str, nn.Module](
                        linear=nn.Linear(before, after), sign=StraightSign()
                    )
                )
                for before, after in pairwise(widths)
            )
        )
        self.output = nn.Linear(widths[-1], options.num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.hidden(self.flatten(inputs)))


class SignWeightMLP(nn.Module):
    """Flatten, then layers with weights of -1 or 1 (`SignLinear`), ReLU between them.

    Its modules are `hidden.0.linear`, `hidden.0.linear.sign`, ..., `output`, `output.sign`.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_outputs: int, *, hidden: Sequence[int] = (64,)
    ) -> None:
        super().__init__()
        options = MLPOptions(input_shape, num_outputs, hidden)
        widths = [prod(options.input_shape), *options.hidden]
        self.flatten = nn.Flatten()
        self.hidden = nn.Sequential(
            *(
                nn.Sequential(
                    OrderedDict[str, nn.Module](linear=SignLinear(before, after), relu=nn.ReLU())
                )
                for before, after in pairwise(widths)
            )
        )
        self.output = SignLinear(widths[-1], options.num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.hidden(self.flatten(inputs)))
