"""Every transform has a config and a row, and gives the result of its row."""

import dataclasses
import re
from typing import Any

import pytest
import torch

from gradsurg.plugins import registry
from gradsurg.plugins.fields import FieldError
from gradsurg.testing.transforms import context_with
from gradsurg.transforms.base import TransformContext
from gradsurg.transforms.chain import Chain
from tests.transforms.cases import CONFIGS, ROWS, Row, build, config, names


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{dict(row.fields)}-{row.step}")
def test_a_transform_gives_the_result_of_its_row(row: Row) -> None:
    transform = build(row.name, row.fields)
    grad = torch.tensor(row.grad)
    value = None if row.value is None else torch.tensor(row.value)
    context = TransformContext(site="a.weight", step=row.step, value=value)
    if row.other is not None:
        context = context_with(torch.tensor(row.other))
    result, _ = transform.update(grad, transform.init(grad), context)
    torch.testing.assert_close(
        result, torch.tensor(row.expected), rtol=row.tolerance, atol=row.tolerance, equal_nan=True
    )


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("clamp", {"low": 3, "high": 1}, "Clamp.low: must be <= high, found low=3.0, high=1.0"),
        ("clamp", {"low": None, "high": None}, "Clamp.low: must be a number if high is null"),
        ("centralize", {"per": "entry"}, "Centralize.per: must not be entry"),
        ("mask", {"amount": 2}, "Mask.amount: must be <= 1 with by=largest, found 2.0"),
        ("mask", {"by": "threshold", "rescale": True}, "Mask.rescale: must be false"),
        ("mask", {"by": "random", "per": "unit"}, "Mask.per: must be tensor with by=random"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError, match=f"^{re.escape(message)}"):
        build(name, fields)


def test_every_config_has_a_row_and_every_row_a_config() -> None:
    assert {row.name for row in ROWS} == set(names())


def test_every_transform_has_a_config_of_its_name() -> None:
    assert set(registry.names("transforms")) <= set(names())


@pytest.mark.parametrize("name", names())
def test_a_config_starts_with_its_command_and_has_one_key_with_its_name(name: str) -> None:
    first, *others = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert first.startswith(f"# python -m gradsurg.run transform={name}")
    assert next(line for line in others if not line.startswith("# ")) == f"{name}:"


@pytest.mark.parametrize("name", names())
def test_a_config_lists_every_field_and_one_named_like_its_class_the_defaults(name: str) -> None:
    made = build(name)
    if isinstance(made, Chain):
        assert set(config(name)) == {"_target_", "_convert_", "links"}
        return
    assert dataclasses.is_dataclass(made)
    assert set(config(name)) == {"_target_", *(field.name for field in dataclasses.fields(made))}
    if registry.name_of(config(name)) == name:
        assert made == type(made)()
