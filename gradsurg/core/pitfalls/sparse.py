"""A gradient may be sparse."""

from gradsurg.core.pitfalls.base import Cell, Pitfall


class SparseGradient(Pitfall):
    """A hook of a sparse embedding gets a sparse tensor, and a row may be in it several times.

    >>> table = nn.Embedding(3, 1, sparse=True)
    >>> handle = table.weight.register_hook(lambda grad: print(grad.layout, grad.is_coalesced()))
    >>> table(torch.tensor([1, 1])).sum().backward()
    torch.sparse_coo False

    https://docs.pytorch.org/docs/stable/sparse.html, "Uncoalesced sparse COO tensors".
    """

    cells = (
        Cell("sparse gradient", "Parameters Buckets Captured", ValueError).refused(
            "{transform} takes no sparse gradient. Use sparse=False in the embedding, or a "
            "stateless elementwise transform that keeps zero and a trigger that reads no gradient."
        ),
    )
