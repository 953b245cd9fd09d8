"""The command `python -m gradsurg.script transform=clip seeds=8 -- train.py --epochs 3`."""

import os
import sys

from gradsurg.plugins.extras import MissingExtra, need
from gradsurg.plugins.messages import tell, typed_command
from gradsurg.plugins.pipes import ignore_closed_pipes

USAGE = """\
usage: {command} [WORDS] -- SCRIPT.py [ITS WORDS]
       {command} [WORDS] -- -m MODULE [ITS WORDS]

  {command} transform=clip seeds=8 -- train.py --epochs 3
  {command} transform=clip dry_run=true -- train.py

WORDS, with their defaults:
  transform=none site=parameters when=steps   as in gradsurg.run, with their fields
  seeds=8 seed=null control=plain             seeds 0 to 7, each with a control run
  metric=null    the outcome: NAME, max:NAME or min:NAME for its best value, higher:NAME or
                 lower:NAME if its name does not say which is better
  margin=null    equivalence: arms that differ by less are equivalent
  tune=null      values of the transform or of the script: tune='--lr=[0.01,0.1]'
  tune_seeds=3   seeds for each of these values
  model=NAME     the variable or class of the model, if the script trains several
  jobs=1         runs at once
  study=SCRIPT out=runs logger=none effects_every=1 force=false report=auto dry_run=false

{{seed}}, {{arm}} and {{out}} in the script's words stand for seed, arm and a folder of the run."""

WRONG_INPUT, INTERRUPTED = 2, 130


def main() -> int:
    """Run the command line, and return the exit code.

    0 if all runs finished, 1 if one failed, 2 if the words are wrong or nothing can be attached,
    130 after an interruption. One line says what is wrong.
    """
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    if not words or {"-h", "--help"} & {*own}:
        print(USAGE.format(command=typed_command("gradsurg.script")))
        return 0 if words else WRONG_INPUT
    try:
        need("run")
    except MissingExtra as error:
        tell(str(error))
        return WRONG_INPUT
    from gradsurg.experiment.errors import ConfigError
    from gradsurg.script.words import parse  # which imports Hydra

    try:
        command = parse(words)
        from gradsurg.script.command import run  # which imports torch

        return run(command)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun each rank has read the words
            tell(str(error))
        return WRONG_INPUT
    except KeyboardInterrupt:
        tell("interrupted; the same command goes on with the runs that are not finished")
        return INTERRUPTED


if __name__ == "__main__":
    ignore_closed_pipes()
    sys.exit(main())
