"""Run a published claim again and compare it with the bands that were stated beforehand.

python scripts/reproduce.py liu2021            its quick form: 0 if the verdicts are as recorded
python scripts/reproduce.py liu2021 --full     at the paper's scale
python scripts/reproduce.py --all              every paper; finished runs are not repeated
python scripts/reproduce.py --list             the papers, their claims and verdicts
python scripts/reproduce.py --table            the table of claims (--write: experiments/README.md)
"""

import sys

from gradsurg.plugins.pipes import ignore_closed_pipes
from gradsurg.reproduce.command import main

if __name__ == "__main__":
    ignore_closed_pipes()
    sys.exit(main(sys.argv[1:]))
