"""What was typed: read, checked as a whole, and written down before anything is trained."""

import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser

from gradsurg.config import compose
from gradsurg.config.build import Experiment
from gradsurg.config.faults import ConfigError
from gradsurg.config.jobs import Job, beginning, job_of, prepare
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.loggers.base import Guarded

WRONG_INPUT = 2


@dataclass
class Asked:
    """What a command asks for: its jobs, each of them right. A question of Hydra's, and a plan,
    asks for none.
    """

    sweeping: bool = False
    jobs: list[Job] = field(default_factory=list)
    loggers: dict[str, Guarded] = field(default_factory=dict)  # each once, by what it is made of
    studies: dict[Path, dict[str, Guarded]] = field(default_factory=dict)  # and its jobs' loggers
    report: bool = True
    force: bool = False
    retry_failed: bool = True
    plan: bool = False
    untrained: int = 0  # jobs of no steps
    news: bool = True  # whether a run was not finished before

    def keep(self, words: list[str], experiment: Experiment) -> None:
        """Keep what is to be known of a job that is right: no model and no data."""
        settings = experiment.settings
        self.plan |= settings.plan
        if settings.steps == 0:
            self.untrained += 1
            return
        out = Path(settings.out)
        runs = [run for pair in experiment.pairs for run in pair.runs]
        self.jobs.append(job_of(words, runs, out))
        of_study = self.studies.setdefault(out / settings.study, {})
        for logger in experiment.loggers:
            of_study[logger.key] = self.loggers.setdefault(logger.key, logger)
        self.report &= settings.report is not False
        self.force |= settings.force
        self.retry_failed &= settings.retry_failed


def asked() -> Asked:
    """Read the command line, say all that is wrong with it at once, and write its runs down.

    Exits with code 2 if anything is wrong. What the surgery warns of is printed here, once.
    """
    sys.argv[1:] = _options_first(sys.argv[1:])
    arguments = get_args_parser().parse_args()
    compose.register()
    if arguments.help or arguments.hydra_help or arguments.info or arguments.shell_completion:
        return Asked()
    found = Asked()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SurgeryWarning)
        try:
            _check(arguments, found)
        except ConfigError as error:
            for fault in error.faults:
                print(fault, file=sys.stderr)
            sys.exit(WRONG_INPUT)
    for text in dict.fromkeys(str(item.message) for item in caught):
        print(f"warning: {text}", file=sys.stderr)
    if arguments.cfg:
        return Asked()
    if found.untrained:
        # An optimizer would bring in PyTorch's compiler, which takes longer than the check.
        jobs = f"{found.untrained} job{'s' if found.untrained > 1 else ''}"
        print(f"steps=0: {jobs} checked without a trial step, nothing to train")
    if found.plan:
        return Asked()
    if found.untrained and not found.jobs:
        sys.exit()
    try:
        states = prepare(found.jobs, found.force)
    except OSError as error:
        print(f"out: cannot be written to: {error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
    found.news = set(states) != {"finished"}
    if found.sweeping:
        print(beginning(len(found.jobs), states, found.retry_failed), file=sys.stderr)
    return found


def _check(arguments: Namespace, found: Asked) -> None:
    name = arguments.config_name or "config"
    dirs = [arguments.config_dir] if arguments.config_dir else []
    words, found.sweeping = compose.sweep(arguments.overrides, arguments.multirun, dirs, name)
    compose.check(words, found.sweeping, dirs, name, found.keep, builds=not arguments.cfg)


def _options_first(words: list[str]) -> list[str]:
    """The parser takes overrides in one piece only: put them behind the options."""
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    return [word for word in words if word not in overrides] + overrides
