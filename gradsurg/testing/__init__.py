"""Check an aggregator or a transform of your own: which properties hold, and whether it keeps the rules.

    from gradsurg.testing import check_aggregator, check_transform

    print(check_transform(gs.Clip(0.5)))
    check_aggregator(lambda rows: rows.median(0).values, declared=["homogeneous"])

Both return a table of what holds, with a counterexample where it does not. Both raise an
AssertionError, one line a fault, if what is declared does not hold or a rule is broken.
"""

from gradsurg.testing.aggregators import check_aggregator
from gradsurg.testing.transforms import check_transform
from gradsurg.testing.verdicts import Table, Verdict

__all__ = ["Table", "Verdict", "check_aggregator", "check_transform"]
