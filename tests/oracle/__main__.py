"""Compare the working tree with the reference.

`python -m tests.oracle [core|runs|texts|claims]`: without a name all four parts.
"""

import sys
import time
from importlib import import_module

from tests.oracle import reference

PARTS = ("core", "runs", "texts", "claims")


def main(names: list[str]) -> int:
    """Run the named parts, by default all; return 1 if one has an unaccepted difference, else 0."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}", file=sys.stderr)
        return 2
    tree = reference.unpack()
    differences = 0
    for name in names or PARTS:
        start = time.perf_counter()
        count = import_module(f"tests.oracle.{name}").main(tree)
        seconds = time.perf_counter() - start
        print(f"{name}: unaccepted differences: {count}, in {seconds:.0f} s", flush=True)
        differences += count
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
