"""The command `gradsurg run|script|report|reproduce|fetch`, also `python -m gradsurg`.

A command's module is imported when it is called, so help needs no other library.
"""

import sys
from importlib import import_module

import gradsurg
from gradsurg.plugins.messages import unknown
from gradsurg.plugins.pipes import ignore_closed_pipes

COMMANDS = {
    "run": ("gradsurg.run", "train with and without a surgery, and compare"),
    "script": ("gradsurg.script.__main__", "the same with your own training script"),
    "report": ("gradsurg.report.__main__", "write the report of a study"),
    "reproduce": ("gradsurg.reproduce.command", "check a paper's claim again"),
    "fetch": ("gradsurg.tasks.fetch.__main__", "store data sets for the tasks"),
}
"""Each command with its module, which has a function `main`, and its purpose."""

HELP = f"""\
usage: gradsurg COMMAND ...

{chr(10).join(f"  {name:<10} {purpose}" for name, (_, purpose) in COMMANDS.items())}

  gradsurg run transform=clip
  gradsurg report runs/digits-mlp

gradsurg COMMAND --help shows more; gradsurg --version the version."""


def main() -> None:
    """Run the command that the first word names, and exit with its code."""
    ignore_closed_pipes()
    name, *words = sys.argv[1:] or [""]
    if name in COMMANDS:
        sys.argv = [f"gradsurg {name}", *words]
        sys.exit(import_module(COMMANDS[name][0]).main())
    elif name in ("-h", "--help"):
        print(HELP)
    elif name == "--version":
        print(f"gradsurg {gradsurg.__version__}")
    else:
        fault = unknown(f"there is no command '{name}'", name, [*COMMANDS])
        print(f"gradsurg: {fault}" if name else HELP, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
