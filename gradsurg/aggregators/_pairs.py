"""The same problems for two gradients, in closed form: what the general solvers must give too.

`cosine` is that of the angle between the two, `norm` and `other` are their lengths; an answer
(v_1, v_2) means the gradient v_1 u_1 + v_2 u_2, where u_i has length one.
"""

from math import sqrt

from gradsurg.aggregators._solvers import RANK

EQUAL = 1e-14  # of the sum of their squares: rows as near as that are one


def shortest(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The shortest x_1 g_1 + x_2 g_2 with x_1 + x_2 = 1, both >= 0."""
    low, high = (norm, other) if norm <= other else (other, norm)
    ratio = low / high
    # |g_1 - g_2|² / high², which is zero only where the two are the same.
    apart = (1 - ratio) ** 2 + 2 * ratio * (1 - cosine)
    share = 0.5 if apart <= 0 else min(max(ratio * (ratio - cosine) / apart, 0.0), 1.0)
    if norm <= other:
        return (1 - share) * norm, share * other
    return share * norm, (1 - share) * other


def mean_onto_dual_cone(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """What is nearest to the mean with g_i · d >= 0 for both."""
    first, second = norm / 2, other / 2
    if (inner := first + cosine * second) < 0:
        return first - inner, second
    if (inner := second + cosine * first) < 0:
        return first, second - inner
    return first, second


def each_onto_dual_cone(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The mean of what is nearest to each with g_i · d >= 0 for both."""
    against = max(-cosine, 0.0)
    return (norm + against * other) / 2, (other + against * norm) / 2


def bargained(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """G w = 1 / w: the same share of each unit gradient; zero where they are opposite."""
    gain = 1 + cosine
    if gain <= 2 * RANK:
        return 0.0, 0.0
    return 1 / sqrt(gain), 1 / sqrt(gain)


def impartial(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The same projection on each unit gradient, and weights that sum to one."""
    if 1 + cosine <= RANK * (1 - cosine):
        return 0.0, 0.0
    both = norm * other / (norm + other)
    return both, both


def conflict_free(cosine: float, norm: float, other: float) -> tuple[float, float]:
    """The bisector, as long as the two projections on it together."""
    if 1 + cosine <= RANK * (1 - cosine):
        return 0.0, 0.0
    return (norm + other) / 2, (norm + other) / 2


def root(cosine: float, norm: float, other: float) -> tuple[float, float, float, float]:
    """G^(-1/2) times the mean's weights as v, and the singular values of the two rows.

    Where the rows are parallel it is the pseudoinverse and the second singular value is zero.
    """
    trace = norm**2 + other**2
    if 1 - abs(cosine) <= RANK * (1 + abs(cosine)):
        sign = 1 if cosine > 0 else -1
        along = (norm + sign * other) / 2 / trace**1.5
        return norm**2 * along, sign * other**2 * along, sqrt(trace), 0.0
    area = norm * other * sqrt((1 - cosine) * (1 + cosine))
    total = sqrt(trace + 2 * area)
    large = (total + sqrt(max(trace - 2 * area, 0.0))) / 2
    inner = cosine * norm * other
    first, second = (square - inner + area for square in (other**2, norm**2))
    scale = 2 * area * total
    return norm * first / scale, other * second / scale, large, area / large


def conflict_averse(cosine: float, norm: float, other: float, c: float) -> tuple[float, float]:
    """The d with |d - g_0| <= c |g_0| that maximizes min(g_1 · d, g_2 · d); g_0 is the mean."""
    first, second = norm / 2, other / 2
    inner = cosine * norm * other
    radius = c * sqrt(max(norm**2 + other**2 + 2 * inner, 0.0)) / 2
    on_first, on_second = first + cosine * second, second + cosine * first
    if norm * (on_first + radius) <= other * (on_second + cosine * radius):
        return first + radius, second
    if other * (on_second + radius) <= norm * (on_first + cosine * radius):
        return first, second + radius
    # Both are served alike: d is on the line at right angles to g_1 - g_2, as far as the ball goes.
    apart = norm**2 + other**2 - 2 * inner
    if apart <= EQUAL * (norm**2 + other**2):
        return first + radius / 2, second + radius / 2
    back = (first - second) * (first + second) * 2 / apart
    shares = (other**2 - inner) / apart, (norm**2 - inner) / apart
    reach = sqrt(max(radius**2 - back**2 * apart, 0.0))
    height = norm * other * sqrt((1 - cosine) * (1 + cosine) / apart)  # the shortest on the line
    # Without a direction that helps both, the one nearest to the mean that harms none.
    y = norm * (shares[0] * reach - back * height), other * (shares[1] * reach + back * height)
    if height == 0 or (radius * height) ** 2 <= RANK * (y[0] + y[1]) ** 2:
        return mean_onto_dual_cone(cosine, norm, other)
    return first + y[0] / height, second + y[1] / height
