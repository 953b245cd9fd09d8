"""What was warned of while a run was trained."""

import warnings
from collections.abc import Iterable

from gradsurg.effects.ledger import SurgeryWarning


def said_once(before: Iterable[str], caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """What the surgery has warned of, each once."""
    new = [str(item.message) for item in caught if item.category is SurgeryWarning]
    return list(dict.fromkeys([*before, *new]))


def pass_on(caught: Iterable[warnings.WarningMessage]) -> None:
    """Warn of what was caught and is not the surgery's: a warning of every step once."""
    told: dict[str | tuple[str, type[Warning], int], int] = {}
    for item in caught:
        if item.category is not SurgeryWarning:
            warnings.warn_explicit(
                item.message, item.category, item.filename, item.lineno, registry=told
            )
