"""Verdicts of `check_transform` and `check_aggregator`, and the assertions that both use."""

import copy
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name", bound=str)
MAX_PRINTED = 12
"""Tensors of at most so many entries are printed in full in a counterexample."""


@dataclass(frozen=True)
class Verdict:
    """Whether a property or a rule holds in every case, with the first counterexample if not."""

    name: str
    declared: bool
    holds: bool
    counterexample: str = ""
    tested: bool = True
    """Whether a case could have been a counterexample."""

    @property
    def broken(self) -> bool:
        """Whether it was declared and does not hold."""
        return self.declared and not self.holds


@dataclass(frozen=True)
class Table:
    """The verdicts on one transform or aggregator; as text, one line each.

    `name` is its repr; `verdicts` are about the properties, `rules` about the rules.
    """

    name: str
    verdicts: tuple[Verdict, ...]
    rules: tuple[Verdict, ...]

    @property
    def holds(self) -> frozenset[str]:
        """The names of the properties that hold in every case, declared or not."""
        return frozenset(verdict.name for verdict in self.verdicts if verdict.holds)

    def __str__(self) -> str:
        lines = [self.name]
        for verdict in (*self.rules, *self.verdicts):
            if verdict.declared:
                answer = "yes" if verdict.holds else "BROKEN"
            else:
                holds = "holds, not declared" if verdict.tested else "not tested"
                answer = holds if verdict.holds else "no"
            lines.append(f"  {verdict.name:<26}{answer:<20}{verdict.counterexample}".rstrip())
        return "\n".join(lines)

    def require_declared(self) -> "Table":
        """Return the table. Raises AssertionError, with one line a fault, if one is broken."""
        faults = [verdict for verdict in (*self.rules, *self.verdicts) if verdict.broken]
        if faults:
            lines = [f"{self.name} lacks declared properties or breaks rules:"]
            lines += [f"  {fault.name}: {fault.counterexample}" for fault in faults]
            raise AssertionError("\n".join(lines))
        return self


def declared_among(
    names: Collection[Name], declared: Collection[Name] | None, own: Collection[Name]
) -> frozenset[Name]:
    """Return `declared`, or `own` if it is None. Raises ValueError for names not in `names`."""
    if unknown := sorted({*(declared or ())} - {*names}):
        raise ValueError(f"declared: must be of {', '.join(names)}, found {', '.join(unknown)}")
    return frozenset(own if declared is None else declared)


def table_of(
    name: str,
    declared: Collection[str],
    checks: Mapping[str, Callable[[], None]],
    rules: Mapping[str, Callable[[], None]],
) -> Table:
    """Run the checks of properties and rules, and return their verdicts.

    Raises AssertionError if a declared property or a rule is broken.
    """
    verdicts = tuple(_verdict(key, key in declared, check) for key, check in checks.items())
    ruled = tuple(_verdict(key, True, rule) for key, rule in rules.items())
    return Table(name, verdicts, ruled).require_declared()


def _verdict(name: str, declared: bool, check: Callable[[], None]) -> Verdict:
    """Run a check that raises AssertionError with a counterexample, and return its verdict."""
    try:
        with failures_at(""):
            check()
    except AssertionError as error:
        return Verdict(name, declared, False, shorten(str(error), 400, placeholder=" ..."))
    return Verdict(name, declared, True)


@contextmanager
def failures_at(place: str) -> Iterator[None]:
    """Turn any exception of the block into an AssertionError that names the place."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:  # a user's code runs here, and any exception of it is a finding
        text = f"raises {type(error).__name__}: {error}"
        raise AssertionError(f"{place}: {text}" if place else text) from error


def expect(condition: bool | Tensor, message: str) -> None:
    """Raise AssertionError with the message if the condition does not hold."""
    if not condition:
        raise AssertionError(message)


def expect_like(result: object, like: Tensor, case: str) -> None:
    """Expect a tensor with the shape, dtype, device and layout of `like`."""
    expect(isinstance(result, Tensor), f"returns {type(result).__name__}, not a tensor, for {case}")
    assert isinstance(result, Tensor)
    for key in ("shape", "dtype", "device", "layout"):
        actual, expected = getattr(result, key), getattr(like, key)
        expect(actual == expected, f"returns {key} {actual}, expected {expected}, for {case}")


def expect_same_structure(
    state: Mapping[str, Tensor], other: Mapping[str, Tensor], message: str
) -> None:
    """Expect two states with the same keys, shapes and dtypes."""
    before, after = (
        {key: (list(value.shape), value.dtype) for key, value in tensors.items()}
        for tensors in (state, other)
    )
    expect(before == after, f"{message}: {before} became {after}")


def expect_unshared(result: Tensor, others: list[Tensor], name: str) -> None:
    """Expect a result that shares no memory with `others`; `name` describes them in the error."""
    storage = result.untyped_storage().data_ptr()
    for other in others:
        shared = bool(other.numel()) and other.untyped_storage().data_ptr() == storage
        expect(not shared, f"the result shares memory with {name}")


def expect_generator_untouched(compute: Callable[[], Tensor]) -> None:
    """Expect a computation that neither uses nor changes the global random generator."""
    before = torch.get_rng_state()
    try:
        first = compute()
        expect(torch.equal(torch.get_rng_state(), before), "draws from the global generator")
        torch.manual_seed(0)  # a draw from it would now be another one
        same = torch.equal(compute(), first)
        expect(same, "a second call differs: it depends on the global generator")
    finally:
        torch.set_rng_state(before)


def expect_value_semantics(subject: object) -> None:
    """Expect copies that are equal, with the same hash and repr."""
    for copied in (copy.deepcopy(subject), pickle.loads(pickle.dumps(subject))):
        expect(copied == subject, "a copy is not equal")
        expect(hash(copied) == hash(subject), "a copy has another hash")
        expect(repr(copied) == repr(subject), "a copy has another repr")


def printed(tensor: Tensor) -> str:
    """Return the entries of a small tensor, the dtype and the shape of a large one."""
    if tensor.numel() > MAX_PRINTED:
        return f"{tensor.dtype} of shape {list(tensor.shape)}"
    return str(_rounded(tensor.tolist()))


def _rounded(numbers: object) -> object:
    if isinstance(numbers, list):
        return [_rounded(number) for number in numbers]
    return float(f"{numbers:.4g}")
