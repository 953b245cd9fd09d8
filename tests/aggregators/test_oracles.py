"""Aggregators beside slow, obvious versions of themselves, which know the gradients themselves."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, nnls

from gradsurg.aggregators._pairwise import draw_orders
from gradsurg.aggregators.base import Aggregator, AggregatorContext
from tests.aggregators.cases import made
from tests.aggregators.inputs import COUNTS, RATIOS, Array, distance, ranks, rows

Slow = Callable[[Array], Array]
CONTEXT = AggregatorContext(step=3, seed=1, group="trunk")


def by(aggregator: Aggregator, matrix: Array, dtype: torch.dtype = torch.float64) -> Array:
    return aggregator(torch.from_numpy(matrix).to(dtype), CONTEXT).double().numpy()


def mgda(matrix: Array) -> Array:
    """By nonnegative least squares on the gradients, with a last row that wants the sum to be 1."""
    scale = np.linalg.norm(matrix, axis=1).min()
    augmented = np.concatenate([matrix / scale, np.ones((len(matrix), 1))], axis=1)
    # Columns of length one: scipy's tolerance is absolute.
    lengths = np.linalg.norm(augmented, axis=1)
    x = nnls((augmented / lengths[:, None]).T, np.eye(augmented.shape[1])[-1])[0] / lengths
    return x / x.sum() @ matrix


def projected(matrix: Array, target: Array) -> Array:
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    size = np.linalg.norm(target)
    return target + size * nnls(unit.T, -target / size)[0] @ unit


def upgrad(matrix: Array) -> Array:
    return np.mean([projected(matrix, row) for row in matrix], axis=0)


def dual_proj(matrix: Array) -> Array:
    return projected(matrix, matrix.mean(0))


def gem(matrix: Array, margin: float) -> Array:
    """As in the authors' code, a shift of the constraints v >= margin of the dual problem."""
    current, memories = matrix[0], matrix[1:]
    target = current + margin * memories.sum(0)
    return projected(memories, target) if len(memories) else target


def con_fig(matrix: Array, shares: Array | float = 1.0) -> Array:
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    direction = np.linalg.pinv(unit, rcond=1e-8) @ (shares * np.ones(len(matrix)))
    direction /= np.linalg.norm(direction)
    return (matrix @ direction).sum() * direction


def imtlg(matrix: Array) -> Array:
    """Equation 4 of the paper: alpha = g_1 Uᵀ (D Uᵀ)⁻¹ with differences to the first task."""
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    apart, turned = matrix[0] - matrix[1:], unit[0] - unit[1:]
    alpha = np.linalg.solve((apart @ turned.T).T, turned @ matrix[0])
    return (1 - alpha.sum()) * matrix[0] + alpha @ matrix[1:]


def aligned_mtl(matrix: Array, shares: Array | None = None) -> Array:
    """A sum, by default the mean, of the rows of sigma U Vᵀ, from the decomposition of J itself."""
    left, sigmas, right = np.linalg.svd(matrix, full_matrices=False)
    shares = np.full(len(matrix), 1 / len(matrix)) if shares is None else shares
    return sigmas[-1] * shares @ left @ right


def krum(matrix: Array) -> Array:
    """With one row that may be bad."""
    scores = []
    for row in matrix:
        squares = sorted(((other - row) ** 2).sum() for other in matrix)
        scores.append(sum(squares[1 : len(matrix) - 2]))
    return matrix[int(np.argmin(scores))]


ORACLES: dict[str, Slow] = {
    "mgda": mgda,
    "upgrad": upgrad,
    "dual_proj": dual_proj,
    "con_fig": con_fig,
    "imtlg": imtlg,
    "aligned_mtl": aligned_mtl,
}


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("count", COUNTS)
def test_independent_gradients_give_the_result_of_the_oracle(name: str, count: int) -> None:
    for ratio in RATIOS:
        for seed in range(3):
            matrix = rows(count, count, ratio, seed, lean=seed / 4)
            expected = ORACLES[name](matrix)
            assert distance(by(made(name), matrix), expected) <= 1e-6, (ratio, seed)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_preference_gives_the_result_of_the_oracle(count: int) -> None:
    for seed in range(6):
        matrix = rows(count, (count, count - 1)[seed % 2], (1.0, 1e3)[seed % 3 % 2], seed)
        shares = np.random.default_rng(seed).uniform(0.1, 2.0, count)
        each = [projected(matrix, row) for row in matrix]
        scaled = shares[:, None] * matrix
        expected = {
            "upgrad": shares @ each,
            "dual_proj": projected(matrix, shares @ matrix),
            "mgda": mgda(scaled),
        }
        for name, update in expected.items():
            found = by(made(name, preference=shares.tolist()), matrix)
            apart = np.linalg.norm(found - update)
            assert apart <= 1e-6 * np.linalg.norm(scaled, axis=1).max(), (name, seed)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_preference_of_independent_gradients_gives_the_result_of_the_oracle(count: int) -> None:
    for seed in range(6):
        matrix = rows(count, count, (1.0, 1e3)[seed % 2], seed, lean=seed / 6)
        shares = np.random.default_rng(seed).uniform(0.1, 2.0, count)
        for name, slow in (("con_fig", con_fig), ("aligned_mtl", aligned_mtl)):
            found = by(made(name, preference=shares.tolist()), matrix)
            assert distance(found, slow(matrix, shares)) <= 1e-6, (name, seed)


@pytest.mark.parametrize("rank", [4, 3])
def test_cagrad_with_a_preference_stays_in_its_ball_and_is_best_there(rank: int) -> None:
    generator = np.random.default_rng(0)
    for seed in range(5):
        matrix = rows(4, rank, 3.0, seed, lean=1.0)
        shares = generator.uniform(0.1, 1.0, 4)
        center = shares @ matrix
        radius = 0.4 * np.linalg.norm(center)
        found = by(made("cagrad", c=0.4, preference=shares.tolist()), matrix)
        assert np.linalg.norm(found - center) <= radius * (1 + 1e-6)
        for _ in range(300):  # of points in the ball, none has a larger worst product
            step = generator.standard_normal(len(matrix)) @ matrix
            other = found + generator.uniform(0, 0.3) * radius * step / np.linalg.norm(step)
            apart = other - center
            other = center + apart * min(1, radius / np.linalg.norm(apart))
            assert (matrix @ other).min() <= (matrix @ found).min() + 1e-9


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-6])
@pytest.mark.parametrize("name", ["upgrad", "dual_proj", "gem"])
def test_tasks_are_told_apart_where_gradients_are_nearly_dependent(name: str, noise: float) -> None:
    generator = np.random.default_rng(0)
    for seed in range(20):
        matrix = rows(5, 3, 30.0, seed) + noise * generator.standard_normal((5, 19))
        shares = np.array([3.0, 0.5, 0.0, 1.0, 2.0])
        match name:
            case "upgrad":
                expected = shares @ [projected(matrix, row) for row in matrix]
            case "dual_proj":
                expected = projected(matrix, shares @ matrix)
            case _:
                expected = gem(matrix, 0.0)
        found = by(made(name, **({} if name == "gem" else {"preference": shares})), matrix)
        apart = np.linalg.norm(found - expected)
        assert apart <= 1e-5 * np.linalg.norm(matrix, axis=1).max(), seed


@pytest.mark.parametrize("margin", [0.0, 0.5])
@pytest.mark.parametrize("count", COUNTS)
def test_gem_solves_the_dual_problem_of_its_paper(count: int, margin: float) -> None:
    for ratio in RATIOS:
        for seed, rank in enumerate(ranks(count)):
            matrix = rows(count, rank, ratio, seed, lean=seed / 4)
            found = by(made("gem", margin=margin), matrix)
            apart = np.linalg.norm(found - gem(matrix, margin))
            assert apart <= 1e-6 * np.linalg.norm(matrix, axis=1).sum(), (ratio, rank)


@pytest.mark.parametrize("name", ["upgrad", "dual_proj", "cagrad", "con_fig", "aligned_mtl"])
def test_a_preference_is_one_share_for_each_task(name: str) -> None:
    message = "preference: must be one share for each task, found 2 for 3 tasks"
    with pytest.raises(ValueError, match=message):
        made(name, preference=(1.0, 2.0))(torch.eye(3))
    with pytest.raises(ValueError, match="preference: must have a share above 0"):
        made(name, preference=(0.0, 0.0))


def test_a_preference_of_mgda_is_above_zero() -> None:
    with pytest.raises(ValueError, match="preference: must be above 0 for each task"):
        made("mgda", preference=(1.0, 0.0))


@pytest.mark.parametrize("name", ["upgrad", "dual_proj", "con_fig"])
@pytest.mark.parametrize("count", [3, 8, 32])
def test_dependent_gradients_give_the_result_of_the_oracle(name: str, count: int) -> None:
    for rank in ranks(count):
        for ratio in RATIOS:
            matrix = rows(count, rank, ratio, seed=0)
            expected = ORACLES[name](matrix)
            apart = np.linalg.norm(by(made(name), matrix) - expected)
            assert apart <= 1e-6 * np.linalg.norm(matrix, axis=1).max(), (rank, ratio)


@pytest.mark.parametrize("name", ["cagrad", "nash_mtl", "fair_grad", *ORACLES])
@pytest.mark.parametrize("count", [2, 8])
def test_float32_gradients_give_nearly_the_result_of_float64(name: str, count: int) -> None:
    for ratio in RATIOS:
        matrix = rows(count, count, ratio, seed=1, lean=0.3).astype(np.float32).astype(np.float64)
        exact = by(made(name), matrix)
        assert distance(by(made(name), matrix, torch.float32), exact) <= 1e-4, ratio


@pytest.mark.parametrize("count", [3, 4, 5, 8, 20])
def test_the_geometric_median_is_where_no_step_is_shorter(count: int) -> None:
    """The unit vectors to the rows add up to zero, or to the number of rows at the median."""
    for ratio in (1.0, 30.0, 1e3):
        for seed in range(10):
            for rank in ranks(count):
                matrix = rows(count, rank, ratio, seed, lean=seed % 3 / 2)
                median = by(made("geometric_median"), matrix)
                distances = np.linalg.norm(median - matrix, axis=1)
                there = distances <= 1e-7 * np.linalg.norm(matrix, axis=1)
                units = (median - matrix)[~there] / distances[~there][:, None]
                assert np.linalg.norm(units.sum(0)) <= there.sum() + 1e-5, (ratio, seed, rank)


def test_the_geometric_median_is_that_of_a_general_minimizer() -> None:
    for seed in range(10):
        matrix = rows(6, 6, 3.0, seed, lean=0.5)

        def total(point: Array, matrix: Array = matrix) -> float:
            return float(np.sqrt(((point - matrix) ** 2).sum(1) + 1e-18).sum())

        best = minimize(total, matrix.mean(0), method="L-BFGS-B", options={"ftol": 1e-15})
        median = by(made("geometric_median"), matrix)
        assert total(median) <= best.fun + 1e-12
        assert distance(median, best.x) <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [1e-7, 3e-7, 1e-6, 3e-6])
def test_the_geometric_median_of_nearly_equal_rows_is_near_them(
    apart: float, dtype: torch.dtype
) -> None:
    for seed in range(10):
        matrix = rows(3 + seed % 6, 1, 1.0, seed)[:1] + apart * rows(3 + seed % 6, 9, 1.0, seed)
        median = by(made("geometric_median"), matrix, dtype)
        assert distance(median, matrix[0]) <= 20 * apart


@pytest.mark.parametrize("gap", [1.0, 1e-5, 1e-9])
def test_the_geometric_median_of_two_rows_is_their_midpoint_in_either_order(gap: float) -> None:
    median = made("geometric_median")
    for seed in range(20):
        generator = np.random.default_rng(seed)
        row = generator.normal(size=50)
        matrix = np.stack([row, row + gap * generator.normal(size=50)])
        for ordered in (matrix, matrix[::-1].copy()):
            np.testing.assert_allclose(by(median, ordered), matrix.mean(0), 1e-14)


def test_a_faulty_row_of_any_length_moves_the_geometric_median_as_little() -> None:
    matrix = rows(5, 5, 1.0, seed=0, lean=1.0)
    medians = [by(made("geometric_median"), matrix * [[s], [1], [1], [1], [1]]) for s in (1e2, 1e6)]
    assert distance(medians[1], medians[0]) <= 0.02


def test_centered_clip_follows_the_algorithm_of_its_paper() -> None:
    for seed in range(5):
        for tau in (0.1, 1.0, 3.0):
            matrix, center = rows(6, 4, 30.0, seed), np.zeros(22)
            for _ in range(4):
                apart = matrix - center
                lengths = np.linalg.norm(apart, axis=1, keepdims=True)
                center = center + (apart * np.minimum(1, tau / lengths)).mean(0)
            found = by(made("centered_clip", tau=tau, num_steps=4), matrix)
            assert distance(found, center) <= 1e-9


def test_krum_takes_the_row_with_the_nearest_neighbours() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        matrix = generator.standard_normal((7, 5)) + 1
        assert (by(made("krum", num_byzantine=1), matrix) == krum(matrix)).all()


@pytest.mark.parametrize("scale", [1e-150, 1e-85, 1e80, 1e150])
def test_nash_weights_are_accurate_for_gradients_of_any_scale(scale: float) -> None:
    matrix = rows(3, 3, 30.0, seed=0)
    nash = made("nash_mtl", max_norm=0.0)
    assert distance(by(nash, matrix * scale) / scale, by(nash, matrix)) <= 1e-9


def paper(matrix: Array, orders: list[list[int]]) -> Array:
    """Algorithm 1 of the paper, and TorchJD's; ConFIG's with a fixed order."""
    total = np.zeros(matrix.shape[1])
    for i, order in enumerate(orders):
        g = matrix[i].copy()
        for j in order:
            if j != i and g @ matrix[j] < 0:
                g -= g @ matrix[j] / (matrix[j] @ matrix[j]) * matrix[j]
        total += g
    return total


def tensorflow(matrix: Array, orders: list[list[int]]) -> Array:
    """The official code: what it shuffles it does not use; a task meets itself too."""
    assert all(order == sorted(order) for order in orders)
    total = np.zeros(matrix.shape[1])
    for row in matrix:
        g = row.copy()
        for other in matrix:
            g -= min(g @ other / (other @ other), 0.0) * other
        total += g
    return total


def pytorch(matrix: Array, orders: list[list[int]]) -> Array:
    """Pytorch-PCGrad: every task, itself too, in a random order; the mean at the end."""
    done = matrix.copy()
    for g, order in zip(done, orders, strict=True):
        for j in order:
            if (inner := g @ matrix[j]) < 0:
                g -= inner * matrix[j] / np.linalg.norm(matrix[j]) ** 2
    return done.mean(0)


def nash_mtl(matrix: Array, orders: list[list[int]]) -> Array:
    """The code of Nash-MTL and of FAMO: as that, with the sum."""
    return pytorch(matrix, orders) * len(matrix)


def libmtl(matrix: Array, orders: list[list[int]]) -> Array:
    """With 1e-8 in the denominator, and the task itself."""
    done = matrix.copy()
    for g, order in zip(done, orders, strict=True):
        for j in order:
            if (inner := g @ matrix[j]) < 0:
                g -= inner * matrix[j] / (matrix[j] @ matrix[j] + 1e-8)
    return done.sum(0)


def in_place(matrix: Array, orders: list[list[int]]) -> Array:
    """The result if the gradients are not copied: tasks meet projected gradients."""
    done = matrix.copy()
    for i, order in enumerate(orders):
        for j in order:
            if j != i and (inner := done[i] @ done[j]) < 0:
                done[i] = done[i] - inner / (done[j] @ done[j]) * done[j]
    return done.sum(0)


VARIANTS: dict[str, tuple[Callable[[Array, list[list[int]]], Array], dict[str, object]]] = {
    "paper": (paper, {}),
    "tensorflow": (tensorflow, {"order": "fixed", "include_self": True}),
    "pytorch": (pytorch, {"reduction": "mean", "include_self": True}),
    "config": (paper, {"order": "fixed"}),
    "libmtl": (libmtl, {"eps": 1e-8, "include_self": True}),
    "nash-mtl": (nash_mtl, {"include_self": True}),
    "one permutation": (paper, {"order": "one_permutation"}),
    "in place": (in_place, {"target": "projected", "include_self": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_each_published_pcgrad_is_reachable(variant: str, count: int) -> None:
    slow, fields = VARIANTS[variant]
    pcgrad = made("pcgrad", **fields)
    orders = draw_orders(pcgrad.order, count, CONTEXT)
    for ratio in RATIOS[:3]:
        for seed in range(5):
            matrix = rows(count, count, ratio, seed)
            assert distance(by(pcgrad, matrix), slow(matrix, orders)) <= 1e-9
    small = rows(count, count, 1.0, 0) * 1e-4  # where an eps of 1e-8 counts
    assert distance(by(pcgrad, small), slow(small, orders)) <= 1e-9


def test_pcgrad_of_three_tasks_can_still_conflict() -> None:
    matrix = rows(3, 2, 1.0, seed=12)
    assert (matrix @ by(made("pcgrad"), matrix)).min() < -0.1


def test_orders_depend_on_the_mode_and_the_step() -> None:
    random = draw_orders("random_per_task", 8, AggregatorContext(step=1))
    assert all(sorted(order) == list(range(8)) for order in random)
    assert len(set(map(tuple, random))) > 4
    assert random == draw_orders("random_per_task", 8, AggregatorContext(step=1))
    assert random != draw_orders("random_per_task", 8, AggregatorContext(step=2))
    one = draw_orders("one_permutation", 8, AggregatorContext(step=1))
    assert len(set(map(tuple, one))) == 1
    assert one[0] != sorted(one[0])
    assert draw_orders("fixed", 3, AggregatorContext()) == [[0, 1, 2]] * 3


def test_grad_vac_equals_the_paper_over_many_steps() -> None:
    count, beta = 4, 0.3
    vac = made("grad_vac", beta=beta)
    state = vac.init(count)
    usual = np.zeros((count, count))
    changed = 0
    for step in range(40):
        context = AggregatorContext(step=step)
        matrix = rows(count, 4, 30.0, step, lean=0.5)
        expected = np.zeros(matrix.shape[1])
        for i, order in enumerate(draw_orders("random_per_task", count, context)):
            g = matrix[i].copy()
            for j in order:
                if j == i:
                    continue
                size, other = np.linalg.norm(g), np.linalg.norm(matrix[j])
                cosine = g @ matrix[j] / size / other
                if cosine < (m := usual[i, j]):
                    changed += 1
                    up = m * np.sqrt(1 - cosine**2) - cosine * np.sqrt(1 - m**2)
                    g += size * up / (other * np.sqrt(1 - m**2)) * matrix[j]
                    assert g @ matrix[j] / np.linalg.norm(g) / other == pytest.approx(m, abs=1e-9)
                usual[i, j] = (1 - beta) * m + beta * cosine
            expected += g
        result, state = vac.merge(torch.from_numpy(matrix), state, context)
        assert distance(result.numpy(), expected) <= 1e-9
    np.testing.assert_allclose(state["cosines"].numpy(), usual, atol=1e-9)
    assert changed > 100


@pytest.mark.parametrize("count", COUNTS)
def test_nash_weights_solve_the_bargaining_equation(count: int) -> None:
    for ratio in RATIOS:
        matrix = rows(count, count, ratio, seed=0)
        result = by(made("nash_mtl", max_norm=0.0, normalize=False), matrix)
        w = 1 / (matrix @ result)
        assert w.min() > 0
        assert distance(w @ matrix, result) <= 1e-9
        assert np.linalg.norm(result) == pytest.approx(np.sqrt(count))
        official = by(made("nash_mtl", max_norm=0.0), matrix)
        size = np.sqrt(np.linalg.norm(matrix @ matrix.T))
        assert distance(official, size * result) <= 1e-9
        limit = by(made("nash_mtl"), matrix)
        assert np.linalg.norm(limit) == pytest.approx(1)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 5.0])
def test_fair_weights_solve_their_equation(alpha: float) -> None:
    for ratio in (1.0, 30.0, 1e3):
        matrix = rows(5, 5, ratio, seed=0)
        result = by(made("fair_grad", alpha=alpha, max_norm=0.0), matrix)
        w = (matrix @ result) ** -alpha
        assert distance(w @ matrix, result) <= 1e-6


@pytest.mark.parametrize("alpha", [5e-324, 1e-6, 1e-3, 0.02, 0.5, 10.0, 1e3, 1e6, 1e300])
def test_fair_weights_are_found_at_every_alpha_and_scale(alpha: float) -> None:
    power = 1 / alpha
    grows = (power - 1) / (power + 1) if power < 1e9 else 1.0
    fair = made("fair_grad", alpha=alpha, max_norm=0.0)
    for count in (2, 5):
        for ratio in RATIOS:
            matrix = rows(count, count, ratio, seed=0)
            result = by(fair, matrix)
            assert result.any()
            for scale in (1e-6, 1e3, 1e6):
                assert distance(by(fair, matrix * scale), result * scale**grows) <= 1e-6, ratio


@pytest.mark.parametrize("scale", ["min", "median", "rmse"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_aligned_gradients_are_orthogonal_and_of_the_chosen_length(scale: str, count: int) -> None:
    matrix = rows(count, count, 30.0, seed=0)
    left, sigmas, right = np.linalg.svd(matrix, full_matrices=False)
    chosen = {
        "min": sigmas[-1],
        "median": float(torch.tensor(sigmas).median()),
        "rmse": np.sqrt((sigmas**2).mean()),
    }
    expected = chosen[scale] * (left @ right).mean(0)
    assert distance(by(made("aligned_mtl", scale=scale), matrix), expected) <= 1e-9


def test_nash_weights_are_reused_for_the_given_number_of_calls() -> None:
    nash = made("nash_mtl", update_weights_every=4, max_norm=0.0)
    fresh = made("nash_mtl", max_norm=0.0)
    state = nash.init(3)
    seen = []
    for step in range(7):
        matrix = torch.from_numpy(rows(3, 3, 30.0, step))
        result, state = nash.merge(matrix, state, CONTEXT)
        seen.append(torch.allclose(result, fresh(matrix)))
    assert seen == [True, False, False, False, True, False, False]
    broken = torch.full((3, 4), torch.nan, dtype=torch.float64)
    result, after = nash.merge(broken, nash.init(3), CONTEXT)
    assert result.isnan().all()
    assert after["age"] == 0
    assert after["weights"].tolist() == [0, 0, 0]
