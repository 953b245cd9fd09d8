"""Find the residual branch of an addition in the autograd graph."""

from collections.abc import Callable
from itertools import count

from torch import nn
from torch.autograd.graph import Node

Test = Callable[[str], bool]


def residual_edge(node: Node, computes: Test) -> int | None:
    """Return the edge of an addition that leads through its residual branch, None without one.

    Both operands come from one tensor, and the branch is the one that is further from it; the other
    is the skip connection, perhaps with a projection. The branch has an operation with a name that
    `computes` accepts, such as a matrix product, so that the sums in a rotary embedding or a gelu
    are no residual connections.
    """
    operands = [following for following, _ in node.next_functions if following is not None]
    if len(operands) != 2 or any(map(_is_parameter, operands)):
        return None
    distances: list[dict[Node, int]] = [{operand: 0} for operand in operands]
    ends = [[operand] for operand in operands]
    for distance in count(1):
        common = distances[0].keys() & distances[1].keys()
        if common or not any(ends):
            break
        for known, end in zip(distances, ends, strict=True):
            following = {
                each for last in end for each, _ in last.next_functions if each is not None
            }
            end[:] = [each for each in following - known.keys() if not _is_parameter(each)]
            known.update(dict.fromkeys(end, distance))
    if not common:
        return None
    nearest = min(common, key=lambda each: distances[0][each] + distances[1][each])
    lengths = [known[nearest] for known in distances]
    branch = int(lengths[1] > lengths[0])
    inside = [each for each, far in distances[branch].items() if far < lengths[branch]]
    if lengths[0] == lengths[1] or not any(computes(each.name()) for each in inside):
        return None
    return [following for following, _ in node.next_functions].index(operands[branch])


def _is_parameter(node: Node) -> bool:
    return isinstance(getattr(node, "variable", None), nn.Parameter)
