"""Check a transform or an aggregator: its properties, and the rules that each must obey.

    from gradsurg.testing import check_aggregator, check_transform

    print(check_transform(gs.Clip(0.5)))
    check_aggregator(lambda rows: rows.median(0).values, declared=["homogeneous"])

Both return a table of the properties that hold, with a counterexample for those that do not. Both
raise AssertionError, with one line a fault, if a declared property does not hold or a rule is
violated.
"""

from gradsurg.testing.aggregators import check_aggregator
from gradsurg.testing.transforms import check_transform
from gradsurg.testing.verdicts import Table, Verdict

__all__ = ["Table", "Verdict", "check_aggregator", "check_transform"]
