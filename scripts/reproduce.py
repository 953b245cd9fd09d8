"""Run a published claim again and hold it against the bands that were stated before.

python scripts/reproduce.py liu2021            its quick form: 0 if every band holds, else 1
python scripts/reproduce.py liu2021 --full     at the paper's scale
python scripts/reproduce.py --all              every paper; finished runs are not repeated
python scripts/reproduce.py --list             the papers, their claims and verdicts
python scripts/reproduce.py --table            the front table, from what was kept with --write
"""

import sys
from pathlib import Path

from gradsurg.reproduce.command import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1], sys.argv[1:]))
