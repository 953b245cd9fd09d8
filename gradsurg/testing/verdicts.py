"""What a check has found: one verdict for each law and each rule, and the table of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten

import torch
from torch import Tensor

State = dict[str, Tensor]
Check = Callable[[], None]
"""Raises AssertionError, with the counterexample, if something does not hold."""

SMALL = 12
"""Matrices of so many entries are written out in a counterexample."""


@dataclass(frozen=True)
class Verdict:
    """Whether a law, a property or a rule holds on every example, and where it first did not."""

    name: str
    declared: bool
    holds: bool
    counterexample: str = ""

    @property
    def broken(self) -> bool:
        """Whether it was promised and does not hold."""
        return self.declared and not self.holds


@dataclass(frozen=True)
class Table:
    """The verdicts on one aggregator or transform; as text, one line each.

    `verdicts` are those on properties or properties, `rules` those on the contract, which all must keep.
    """

    thing: str
    verdicts: tuple[Verdict, ...]
    rules: tuple[Verdict, ...]

    @property
    def holds(self) -> frozenset[str]:
        """The properties or properties that hold on every example, declared or not."""
        return frozenset(verdict.name for verdict in self.verdicts if verdict.holds)

    def __str__(self) -> str:
        lines = [self.thing]
        for verdict in (*self.rules, *self.verdicts):
            word = {(True, True): "yes", (True, False): "BROKEN"}.get(
                (verdict.declared, verdict.holds), "holds, not declared" if verdict.holds else "no"
            )
            lines.append(f"  {verdict.name:<26}{word:<20}{verdict.counterexample}".rstrip())
        return "\n".join(lines)


def judged(name: str, declared: bool, check: Check) -> Verdict:
    """The verdict of one check."""
    try:
        with at(""):
            check()
    except AssertionError as error:
        found = str(error)
    else:
        return Verdict(name, declared, True)
    return Verdict(name, declared, False, shorten(found, 400, placeholder=" ..."))


@contextmanager
def at(place: str) -> Iterator[None]:
    """What is raised in the block becomes an AssertionError that names the place."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:  # anyone's code runs here, and whatever it raises is a finding
        said = f"raises {type(error).__name__}: {error}"
        raise AssertionError(f"{place}: {said}" if place else said) from error


def demanded(table: Table) -> Table:
    """The table. Raises AssertionError, one line a fault, if it holds something broken."""
    faults = [verdict for verdict in (*table.rules, *table.verdicts) if verdict.broken]
    if faults:
        lines = [f"{table.thing} does not keep what it promises:"]
        lines += [f"  {fault.name}: {fault.counterexample}" for fault in faults]
        raise AssertionError("\n".join(lines))
    return table


def expect(condition: bool | Tensor, message: str) -> None:
    """Raise AssertionError with the message if the condition does not hold."""
    if not condition:
        raise AssertionError(message)


def expect_like(result: object, like: Tensor, what: str) -> None:
    """It must be a tensor of the shape, dtype, device and layout of `like`."""
    expect(isinstance(result, Tensor), f"gives {type(result).__name__} and no tensor for {what}")
    assert isinstance(result, Tensor)
    for key in ("shape", "dtype", "device", "layout"):
        found, wanted = getattr(result, key), getattr(like, key)
        expect(found == wanted, f"gives {key} {found} in place of {wanted} for {what}")


def expect_same_structure(state: State, other: State, what: str) -> None:
    """Both must have the same keys, shapes and dtypes."""
    one, two = (
        {key: (list(value.shape), value.dtype) for key, value in each.items()}
        for each in (state, other)
    )
    expect(one == two, f"{what}: {one} became {two}")


def expect_unshared(result: Tensor, others: list[Tensor], what: str) -> None:
    """The result must share memory with none of the others."""
    own = result.untyped_storage().data_ptr()
    for other in others:
        shared = bool(other.numel()) and other.untyped_storage().data_ptr() == own
        expect(not shared, f"the result shares memory with {what}")


def expect_generator_untouched(draw: Callable[[], Tensor]) -> None:
    """It must neither use the global generator nor change it."""
    before = torch.get_rng_state()
    try:
        first = draw()
        expect(torch.equal(torch.get_rng_state(), before), "draws from the global generator")
        torch.manual_seed(0)  # a draw from it would now be another one
        expect(torch.equal(draw(), first), "does not repeat itself: it depends on the global state")
    finally:
        torch.set_rng_state(before)


def written(tensor: Tensor) -> str:
    """A small tensor with its numbers, a large one by its shape."""
    if tensor.numel() > SMALL:
        return f"{tensor.dtype} of shape {list(tensor.shape)}"
    return str(_rounded(tensor.tolist()))


def _rounded(numbers: object) -> object:
    if isinstance(numbers, list):
        return [_rounded(number) for number in numbers]
    return float(f"{numbers:.4g}")
