"""The command `python -m gradsurg.reproduce liu2021`."""

import sys

from gradsurg.plugins.pipes import ignore_closed_pipes
from gradsurg.reproduce.command import main

if __name__ == "__main__":
    ignore_closed_pipes()
    sys.exit(main(sys.argv[1:]))
