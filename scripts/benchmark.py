"""Compare methods of gradient surgery, tuned alike, on tasks whose losses conflict.

python scripts/benchmark.py --list      the tasks, their levels and the methods
python scripts/benchmark.py quick       one level of each task, six methods: half an hour
python scripts/benchmark.py full        all of them: hours; what is finished is kept
"""

import sys

from gradsurg.plugins.pipes import ignore_closed_pipes
from gradsurg.reproduce.benchmark_command import main

if __name__ == "__main__":
    ignore_closed_pipes()
    sys.exit(main(sys.argv[1:]))
