"""The command `python -m gradsurg.script transform=clip seeds=8 -- train.py --epochs 3`."""

import sys

from gradsurg.experiment.errors import WRONG_INPUT, ConfigError
from gradsurg.plugins.extras import MissingExtra, need
from gradsurg.plugins.messages import tell
from gradsurg.plugins.pipes import ignore_closed_pipes

INTERRUPTED = 130


def main() -> int:
    """Run the command line, and return its exit code; one line says what is wrong."""
    try:
        need("run")
        from gradsurg.script.command import main as command  # which imports torch

        return command(sys.argv[1:])
    except (ConfigError, MissingExtra) as error:
        tell(str(error))
        return WRONG_INPUT
    except KeyboardInterrupt:
        tell("interrupted; the same command goes on with the runs that are not finished")
        return INTERRUPTED


if __name__ == "__main__":
    ignore_closed_pipes()
    sys.exit(main())
