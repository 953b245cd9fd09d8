"""The command `python -m gradsurg.script transform=clip seeds=8 -- train.py --epochs 3`."""

import os
import sys

from gradsurg.plugins.extras import MissingExtra, need
from gradsurg.plugins.messages import tell, typed_command
from gradsurg.plugins.pipes import ignore_closed_pipes

USAGE = """\
usage: {command} [KEY=VALUE ...] -- SCRIPT.py [ARGUMENTS]
       {command} [KEY=VALUE ...] -- -m MODULE [ARGUMENTS]

  {command} transform=clip seeds=8 -- train.py --epochs 3
  {command} transform=clip -- train.py --seed {{seed}}
  {command} transform=clip dry_run=true -- train.py

Keys, with their defaults. Those without a text are as in gradsurg.run.

  transform=none   the change to the gradients, as in gradsurg.run, with its
                   fields: transform=clip transform.clip.value=0.02
  site=parameters  where it acts
  when=steps       the condition under which it acts
  seeds=8          seeds 0 to 7, each with a run of each arm; seed=3: only 3
  control=plain    the arm to compare with
  metric=null      the number to compare, by the NAME under which the script
                   reports it: to gradsurg.outcome(NAME=..), to W&B or to
                   TensorBoard, or printed as NAME: number. max:NAME or
                   min:NAME takes its best value, not its last; higher:NAME or
                   lower:NAME says what is better, if the name does not.
                   null: one is chosen, and all names are printed
  margin=null      arms that differ by less are equivalent
  tune=null        each arm tries these values of a field of the transform or
                   of an option of the script, on other seeds, and keeps the
                   one with the best metric: tune='--lr=[0.01,0.1]'
  tune_seeds=3     seeds for each of these values
  model=NAME       the model's variable or class, if the script trains several
  jobs=1           runs at once
  study=SCRIPT     the name of the study, by default that of the script
  out=runs logger=none effects_every=1 force=false retry_failed=true
  report=auto dry_run=false

In the arguments {{seed}}, {{arm}} and {{out}} stand for the seed, the arm and
a folder inside that of the run. The random generators of Python, NumPy and
PyTorch are seeded; if your script seeds itself, pass {{seed}} to it, as above."""

WRONG_INPUT, INTERRUPTED = 2, 130


def main() -> int:
    """Run the command line, and return the exit code.

    0: all runs finished, 1: one failed, 2: wrong words, or nothing attached, 130: interrupted.
    """
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    if not words or {"-h", "--help"} & {*own}:
        print(USAGE.format(command=typed_command("gradsurg.script")))
        if words:
            return 0
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
