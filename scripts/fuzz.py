"""Give the command random wrong input, and count each way in which it fails badly.

python scripts/fuzz.py [--count 5000] [--seed 0]

A command must end with exit code 0, 1 or 2 within 10 seconds, without a traceback, and write to its
own folder only. The exit code is 1 if one does not.
"""

import argparse
import sys
from collections import Counter

import fuzz_overrides
from fuzz_watch import in_fresh_folder

PROGRESS = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    fuzz_overrides.prepare()
    totals: Counter[str] = Counter()
    for index in range(arguments.first, arguments.first + arguments.count):
        for outcome in in_fresh_folder(fuzz_overrides.case, f"{arguments.seed}-{index}"):
            totals[f"exit code {outcome.code}"] += 1
            for fault in outcome.faults:
                totals[fault.kind] += 1
                print(f"{arguments.seed}-{index}: {outcome.words}\n  {fault.text}", flush=True)
        if not (index + 1) % PROGRESS:
            print(f"{index + 1} ..", file=sys.stderr, flush=True)
    bad = sum(number for kind, number in totals.items() if not kind.startswith("exit code"))
    print("; ".join(f"{kind}: {number}" for kind, number in sorted(totals.items())))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
