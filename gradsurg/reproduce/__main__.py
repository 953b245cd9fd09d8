"""The command `python -m gradsurg.reproduce liu2021`."""

import sys

from gradsurg.plugins.pipes import outlive_readers
from gradsurg.reproduce.command import main

if __name__ == "__main__":
    outlive_readers()
    sys.exit(main(sys.argv[1:]))
