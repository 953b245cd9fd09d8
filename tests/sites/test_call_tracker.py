"""Call tracker: the tensors in nested values."""

import torch

from gradsurg.sites.module_calls import tensors_in
from tests.sites.points import Answer, Named


def test_tensors_are_found_in_dicts_lists_tuples_and_dataclasses() -> None:
    first, second, whole = torch.ones(1), torch.ones(2), torch.ones(1, dtype=torch.long)
    nested = Answer(first, {"loss": second, "index": whole})
    assert [path for path, _ in tensors_in(nested)] == [".logits", ".extra.loss"]
    assert [path for path, _ in tensors_in(Named(first, [second, second]))] == [
        ".0",
        ".1.0",
        ".1.1",
    ]
    assert [path for path, _ in tensors_in(first)] == [""]
    assert list(tensors_in((None, "text", Answer, whole))) == []
