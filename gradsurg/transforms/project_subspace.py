"""ProjectSubspace: project the gradient onto a subspace, or onto its complement."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Literal
from zipfile import is_zipfile

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.plugins.messages import shortened
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import (
    GroupTransform,
    Scope,
    TransformContext,
    TransformProperty,
    TransformState,
    fixed_weights,
)


@validated
class ProjectSubspace(GroupTransform):
    """Remove the part of the gradient in a subspace, g - Q Qᵀ g, or with `onto` keep it: Q Qᵀ g.

    Args:

    - `path`: a file of `torch.save({parameter name: basis})`, made by `gs.ogd_basis`,
      `gs.gpm_basis` or by yourself, with each parameter of the site.
    - `rank`: without `path`, the dimensions of a random subspace.

    A basis has a vector in each column. It is orthonormalized when it is read, and columns that
    depend on others are dropped. Without columns the subspace is {0}: nothing is removed, or with
    `onto` all.

    | `vectors` | projected | basis of a parameter |
    |---|---|---|
    | `tensor` | each gradient as one vector | (entries, k) |
    | `rows` | each row of the gradient as a matrix (outputs, inputs) | (inputs, k) |
    | `group` | all gradients as one vector | (entries, k), with the same k for all |

    `group` is orthogonal gradient descent: Farajtabar et al., AISTATS 2020 (arXiv 1910.07104).
    `rows` is gradient projection memory: Saha, Garg and Roy, ICLR 2021 (arXiv 2103.09762).

    A random subspace is the same at every step: it depends on the seed and the site, and is drawn
    again at each call in place of being stored. With `onto` this is training in a random subspace
    (Li et al., ICLR 2018, arXiv 1804.08838), and a control for the others. A run is identified by
    the path, not by the content of the file: write another basis to another file.

    Any shape; zero stays zero, an empty tensor empty. A NaN makes its vector NaN, an infinity NaN
    or infinite.
    """

    path: str | None = None
    onto: bool = False
    _: KW_ONLY
    vectors: Literal["tensor", "rows", "group"] = "tensor"
    rank: Annotated[int, Field(ge=1)] = 1

    def __post_init__(self) -> None:
        bases = None if self.path is None else _orthonormal_bases(self.path, self.vectors)
        object.__setattr__(self, "_bases", bases)
        object.__setattr__(self, "_placed", {})  # copies on other devices and of other dtypes

    @property
    def scope(self) -> Scope:
        return "group" if self.vectors == "group" else "tensor"

    tags = frozenset(
        {"homogeneous", "idempotent", "linear", "odd", "norm_non_increasing", "differentiable"}
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"deterministic": self.path is not None}

    def check_parameters(self, params: Mapping[str, Tensor]) -> None:
        if self.path is not None:
            for name, param in params.items():
                self._read_basis(name, self._rows(param).shape[1])
            self._check_whole(list(params))

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        rows = [self._rows(grad) for grad in grads]
        entries = sum(row.shape[1] for row in rows) if self.vectors == "group" else None
        pairs = zip(rows, contexts, strict=True)
        bases = [self._basis(row, context, entries or row.shape[1]) for row, context in pairs]
        if self.vectors == "group":
            joint = torch.cat([row.to(rows[0].device) for row in rows], dim=1)
            self._check_whole([_name(context) for context in contexts])
            basis = torch.cat([basis.to(joint) for basis in bases])
            basis = orthonormal(basis) if self.path is None else basis
            parts = self._projected(joint, basis).split([row.shape[1] for row in rows], dim=1)
        else:
            parts = [self._projected(*pair) for pair in zip(rows, bases, strict=True)]
        pairs = zip(parts, grads, strict=True)
        return [part.to(grad).view(grad.shape) for part, grad in pairs], state

    def _rows(self, grad: Tensor) -> Tensor:
        """The vectors to project, (number, entries)."""
        wide = widened(grad)
        by_row = self.vectors == "rows" and grad.ndim > 1
        return wide.reshape(len(wide), wide[:1].numel()) if by_row else wide.reshape(1, -1)

    def _projected(self, rows: Tensor, basis: Tensor) -> Tensor:
        if not rows.numel():
            return rows
        peak = rows.abs().amax(dim=1, keepdim=True)  # so that no product overflows
        peak = torch.where((peak > 0) & peak.isfinite(), peak, 1.0)
        unit = rows / peak
        inside = (unit @ basis) @ basis.T
        return peak * (inside if self.onto else unit - inside)

    def _basis(self, rows: Tensor, context: TransformContext, entries: int) -> Tensor:
        """Return the basis of one gradient, a part of vectors with so many entries."""
        bases: dict[str, Tensor] | None = vars(self)["_bases"]
        if bases is None:
            # All entries of a vector have the same variance, also those of other gradients.
            scale = (rows.shape[1] / max(1, entries)) ** 0.5
            drawn = fixed_weights(context, scale, min(self.rank, entries), rows).T
            return drawn if self.vectors == "group" else orthonormal(drawn)
        name = _name(context)
        basis = self._read_basis(name, rows.shape[1])
        if (basis.device, basis.dtype) == (rows.device, rows.dtype):
            return basis
        placed: dict[object, Tensor] = vars(self)["_placed"]
        key = name, rows.device, rows.dtype
        if key not in placed:
            placed[key] = basis.to(rows)
        return placed[key]

    def _read_basis(self, name: str, entries: int) -> Tensor:
        """Return the basis of a parameter. Raises ValueError if the file has none that fits."""
        bases: dict[str, Tensor] = vars(self)["_bases"]
        basis = bases.get(name)
        if basis is None or len(basis) != entries:
            found = "no basis" if basis is None else f"one of shape {list(basis.shape)}"
            raise ValueError(
                f"ProjectSubspace: '{name}' needs a basis of shape [{entries}, k] with "
                f"vectors={self.vectors}, and {self.path} has {found}. It has those of: "
                f"{shortened(bases) or 'none'}"
            )
        return basis

    def _check_whole(self, names: Sequence[str]) -> None:
        """Raise ValueError if the group is only a part of the vectors in the file."""
        absent = sorted(set(vars(self)["_bases"] or ()) - set(names))
        if absent and self.vectors == "group":
            raise ValueError(
                f"ProjectSubspace: the vectors of {self.path} also have entries of "
                f"{shortened(absent)}, which are not in the group: select all of its parameters"
            )


def orthonormal(vectors: Tensor) -> Tensor:
    """Return an orthonormal basis (d, rank) of the columns (d, k), by QR and an SVD of R.

    A direction counts if its singular value is larger than the largest times eps max(d, k).
    """
    if not vectors.numel():
        return vectors[:, :0]
    wide = vectors.double()
    rotation, triangle = torch.linalg.qr(wide)
    left, values, _ = torch.linalg.svd(triangle, full_matrices=False)
    noise = torch.finfo(vectors.dtype).eps * max(vectors.shape)
    kept = values > values.amax() * noise
    return (rotation @ left[:, kept]).to(vectors.dtype)


def _orthonormal_bases(path: str, vectors: str) -> dict[str, Tensor]:
    """Read a file of bases. Raises Contradiction, which names the field."""
    bases = _read(path)
    if vectors != "group":
        return {name: orthonormal(basis) for name, basis in bases.items()}
    counts = {name: basis.shape[1] for name, basis in bases.items()}
    if len(set(counts.values())) > 1:
        raise Contradiction("path", f"{path}: vectors=group needs equal columns, found {counts}")
    if not bases:
        return {}
    joint = orthonormal(torch.cat(list(bases.values())))
    parts = joint.split([len(basis) for basis in bases.values()])
    return dict(zip(bases, parts, strict=True))


def _read(path: str) -> dict[str, Tensor]:
    try:
        with Path(path).open("rb") as file:
            if not is_zipfile(file):
                raise Contradiction("path", f"{path} is no file of torch.save")
            file.seek(0)
            bases = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Contradiction("path", f"cannot be read, found {path}: {error.strerror}") from None
    except (UnpicklingError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        raise Contradiction("path", f"{path} is no file of torch.save: {first}") from None
    if not isinstance(bases, Mapping):
        kind = type(bases).__name__
        raise Contradiction("path", f"{path} must hold {{parameter name: basis}}, found a {kind}")
    for name, basis in bases.items():
        if not isinstance(basis, Tensor) or basis.ndim != 2 or not basis.is_floating_point():
            found = f"shape {list(basis.shape)}" if isinstance(basis, Tensor) else repr(basis)
            text = f"the basis of '{name}' must be a matrix (entries, k) of floats, found {found}"
            raise Contradiction("path", f"{path}: {text}")
        if not basis.isfinite().all():
            raise Contradiction("path", f"{path}: the basis of '{name}' has a NaN or an infinity")
    return {str(name): widened(basis) for name, basis in bases.items()}


def _name(context: TransformContext) -> str:
    """The name of the parameter: a site can be one of its uses, `name/use[0]`."""
    return context.site.partition("/")[0]
