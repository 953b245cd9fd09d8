"""OGD and GPM: the bases, their files, and what a projected step keeps."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradsurg as gs
from gradsurg.plugins.fields import FieldError
from gradsurg.transforms.base import TransformContext
from gradsurg.transforms.project_subspace import orthonormal
from tests.nets import attached, batch, sgd, small, train, weights


def saved(basis: object, folder: Path) -> str:
    path = folder / "basis.pt"
    torch.save(basis, path)
    return str(path)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def act(transform: gs.ProjectSubspace, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    contexts = [TransformContext(name) for name in grads]
    results, _ = transform.update_group(list(grads.values()), {}, contexts)
    return dict(zip(grads, results, strict=True))


def residual(vectors: Tensor, target: Tensor) -> Tensor:
    """Return what the columns of `vectors` cannot explain, by least squares."""
    solution = torch.linalg.lstsq(vectors, target, driver="gelsd").solution
    return target - vectors @ solution


@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("rank", [0, 3, 4])
def test_a_projection_is_the_residual_of_least_squares(
    tmp_path: Path, onto: bool, rank: int
) -> None:
    """With rank 4 the last column depends on the others."""
    grads = {"a": random(3, 4), "b": random(5, seed=1)}
    vectors = {name: random(grad.numel(), 4, seed=2)[:, :rank] for name, grad in grads.items()}
    rows = {"a": random(4, rank, seed=3), "b": random(5, rank, seed=4)}
    if rank == 4:
        for basis in (*vectors.values(), rows["b"]):
            basis[:, 3] = basis[:, 0] - 2 * basis[:, 1]
        rows["a"][:, 3] = rows["a"][:, 0]
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    joint = residual(torch.cat(list(vectors.values())), flat[:, None])[:, 0]
    expected = {
        "tensor": {
            name: residual(vectors[name], grad.view(-1, 1)).view(grad.shape)
            for name, grad in grads.items()
        },
        "rows": {
            "a": residual(rows["a"], grads["a"].T).T,
            "b": residual(rows["b"], grads["b"][:, None])[:, 0],
        },
        "group": {"a": joint[:12].view(3, 4), "b": joint[12:]},
    }
    for kind, off in expected.items():
        path = saved(rows if kind == "rows" else vectors, tmp_path)
        results = act(gs.ProjectSubspace(path, onto, vectors=kind), grads)
        for name, result in results.items():
            wanted = grads[name] - off[name] if onto else off[name]
            torch.testing.assert_close(result, wanted, rtol=1e-9, atol=1e-9)


def test_an_orthonormal_basis_spans_the_columns_and_drops_dependent_ones() -> None:
    vectors = random(6, 2) @ random(2, 4, seed=1)
    basis = orthonormal(vectors)
    assert basis.shape == (6, 2)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(basis @ basis.T @ vectors, vectors)
    assert orthonormal(torch.zeros(3, 2)).shape == orthonormal(torch.zeros(3, 0)).shape == (3, 0)


def test_a_step_after_ogd_keeps_the_logits_of_earlier_labels_to_first_order(tmp_path: Path) -> None:
    model = small()
    inputs, labels = batch(0)
    path = saved(gs.ogd_basis(model, [(inputs[:3], labels[:3])]), tmp_path)
    changes = {}
    for name, transform in (
        ("ogd", gs.ProjectSubspace(path, vectors="group")),
        ("free", gs.Identity()),
    ):
        model = small()
        before = model(inputs[:3]).gather(1, labels[:3, None]).detach()
        optimizer = sgd(model, lr=1e-4)
        with attached(model, transform, gs.Parameters(stage="step"), optimizer):
            train(model, optimizer, 1, start=7)
        after = model(inputs[:3]).gather(1, labels[:3, None]).detach()
        changes[name] = (after - before).norm().item()
    assert changes["ogd"] < 1e-2 * changes["free"]


def test_ogd_is_gram_schmidt_over_the_gradients_of_single_logits() -> None:
    model = small().double()
    inputs, labels = batch(0)
    basis = gs.ogd_basis(model, [(inputs.double()[:4], labels[:4])])
    joint = torch.cat(list(basis.values()))
    memory: list[Tensor] = []
    for example, label in zip(inputs.double()[:4], labels[:4], strict=True):
        model.zero_grad()
        model(example)[label].backward()
        vector = torch.cat([param.grad.flatten() for param in model.parameters()])  # pyright: ignore
        for _ in range(2):
            for other in memory:
                vector = vector - (vector @ other) * other
        if vector.norm() > 1e-9:
            memory.append(vector / vector.norm())
    by_hand = torch.stack(memory, dim=1)
    torch.testing.assert_close(joint @ joint.T, by_hand @ by_hand.T)
    halves = gs.ogd_basis(model, [(inputs.double()[:2], labels[:2])])
    extended = gs.ogd_basis(model, [(inputs.double()[2:4], labels[2:4])], before=halves)
    again = torch.cat(list(extended.values()))
    torch.testing.assert_close(again @ again.T, joint @ joint.T)


def test_steps_after_gpm_keep_the_outputs_for_earlier_inputs(tmp_path: Path) -> None:
    """With a threshold of 1 exactly, since the weights of every layer keep their outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, stride=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, 8, bias=False),
        nn.ReLU(),
        nn.Linear(8, 2, bias=False),
    )
    old, new = torch.randn(2, 1, 5, 5), torch.randn(8, 1, 5, 5)
    old[:, :, 1:] = 0  # the patches of the first layer must not span everything
    path = saved(gs.gpm_basis(model, [old[:1], old[1:]], threshold=1.0), tmp_path)
    before, start = model(old).detach(), weights(model)
    optimizer = sgd(model, lr=0.05)
    transform = gs.ProjectSubspace(path, vectors="rows")
    with attached(model, transform, gs.Parameters("*.weight"), optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            functional.cross_entropy(model(new), torch.arange(8) % 2).backward()
            optimizer.step()
    assert not any(map(torch.equal, weights(model), start))
    torch.testing.assert_close(model(old), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.5, 0.9, 0.999])
def test_gpm_takes_the_fewest_directions_that_reach_the_threshold(threshold: float) -> None:
    layer = nn.Linear(6, 2)
    first, second = random(20, 6).float(), random(20, 6, seed=1).float()
    memory = gs.gpm_basis(layer, [first], threshold=threshold)
    extended = gs.gpm_basis(layer, [second], threshold=threshold, before=memory)["weight"]
    (basis,) = memory.values()
    _, values, right = torch.linalg.svd(first, full_matrices=False)
    shares = values.square().cumsum(0) / values.square().sum()
    rank = int((shares < threshold).sum()) + 1
    torch.testing.assert_close(basis @ basis.T, right[:rank].T @ right[:rank])
    kept = (second @ extended).square().sum() / second.square().sum()
    assert kept >= threshold
    assert torch.linalg.matrix_norm(extended.T @ basis, 2) <= 1 + 1e-5
    torch.testing.assert_close(extended @ (extended.T @ basis), basis)
    if extended.shape[1] > rank:
        without = extended[:, :-1]  # one direction less does not reach it
        assert (second @ without).square().sum() / second.square().sum() < threshold


def test_one_random_subspace_is_kept_for_all_calls() -> None:
    grads = [random(2, 3, seed=seed) for seed in range(5)]
    transform = gs.ProjectSubspace(onto=True, rank=2)
    results = [act(transform, {"a": grad})["a"].flatten() for grad in grads]
    assert torch.linalg.matrix_rank(torch.stack(results)) == 2


def test_a_random_direction_of_a_group_is_as_likely_in_each_of_its_entries() -> None:
    """The projection of a unit vector onto a direction q is its entry of q, times q."""
    grads = {"long": torch.zeros(990), "short": torch.zeros(2, 5), "empty": torch.zeros(0, 3)}
    grads["long"][0] = 1.0
    shares = []
    for seed in range(20):
        transform = gs.ProjectSubspace(onto=True, vectors="group")
        contexts = [TransformContext(name, seed=seed) for name in grads]
        (long, short, _), _ = transform.update_group(list(grads.values()), {}, contexts)
        squares = long.square().sum(), short.square().sum()
        shares.append(float(squares[1] / sum(squares)))
    assert sum(shares) / len(shares) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("rank", [3, 5, 9])
def test_a_random_subspace_of_a_group_may_have_a_rank_above_the_size_of_a_gradient(
    rank: int,
) -> None:
    grads = [{"a": random(2, 2, seed=seed), "b": random(1, seed=9 + seed)} for seed in range(8)]
    transform = gs.ProjectSubspace(onto=True, vectors="group", rank=rank)
    results = [act(transform, grad) for grad in grads]
    joint = torch.stack([torch.cat([part.flatten() for part in one.values()]) for one in results])
    assert torch.linalg.matrix_rank(joint) == min(rank, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"ProjectSubspace\.path: cannot be read, found .*: No such file"),
        ("text", "is no file of torch.save"),
        ([1], r"must hold \{parameter name: basis\}, found a list"),
        ({"a": torch.ones(3)}, r"the basis of 'a' must be a matrix .* found shape \[3\]"),
        ({"a": 1.0}, r"the basis of 'a' must be a matrix .* found 1\.0"),
        ({"a": torch.full((3, 1), torch.nan)}, "the basis of 'a' has a NaN"),
    ],
)
def test_a_wrong_file_is_refused_when_the_transform_is_made(
    tmp_path: Path, content: object, message: str
) -> None:
    path = str(tmp_path / "basis.pt")
    if content == "text":
        (tmp_path / "basis.pt").write_text("text", encoding="utf-8")
    elif content is not None:
        saved(content, tmp_path)
    with pytest.raises(FieldError, match=message):
        gs.ProjectSubspace(path)


def test_bases_that_do_not_fit_the_parameters_are_errors(tmp_path: Path) -> None:
    path = saved({"a": torch.ones(3, 1), "b": torch.ones(2, 1)}, tmp_path)
    with pytest.raises(ValueError, match=r"'c' needs a basis of shape \[3, k\] .* has no basis"):
        act(gs.ProjectSubspace(path), {"c": torch.ones(3)})
    with pytest.raises(ValueError, match=r"shape \[2, k\] with vectors=rows, .* shape \[3, 1\]"):
        act(gs.ProjectSubspace(path, vectors="rows"), {"a": torch.ones(3, 2)})
    with pytest.raises(ValueError, match="also have entries of b, which are not in the group"):
        act(gs.ProjectSubspace(path, vectors="group"), {"a": torch.ones(3)})
    model = small()
    surgery = gs.Surgery(gs.Intervention(gs.ProjectSubspace(path), at=gs.Parameters("*.weight")))
    with pytest.raises(ValueError, match=r"'first.weight' needs .* It has those of: a, b"):
        surgery.attach(model)
    part = saved(gs.ogd_basis(model, [batch()]), tmp_path)
    group = gs.Intervention(gs.ProjectSubspace(part, vectors="group"), gs.Parameters("*.weight"))
    with pytest.raises(ValueError, match="also have entries of first.bias, last.bias"):
        gs.Surgery(group).attach(model, sgd(model))
    path = saved({"a": torch.ones(3, 1), "b": torch.ones(2, 1)}, tmp_path)
    uneven = saved({"a": torch.ones(3, 1), "b": torch.ones(2, 2)}, tmp_path)
    with pytest.raises(FieldError, match="vectors=group needs equal columns"):
        gs.ProjectSubspace(uneven, vectors="group")


def test_what_gives_no_basis_is_an_error() -> None:
    with pytest.raises(ValueError, match="batches: must have an example"):
        gs.ogd_basis(small(), [])
    with pytest.raises(ValueError, match="model: has no Linear and no Conv2d"):
        gs.gpm_basis(nn.ReLU(), [torch.ones(2)])
    with pytest.raises(ValueError, match="threshold: must be > 0 and <= 1, found 1.5"):
        gs.gpm_basis(small(), [], threshold=1.5)
    with pytest.raises(ValueError, match="before: must have the trainable parameters"):
        gs.ogd_basis(small(), [batch()], before={})
