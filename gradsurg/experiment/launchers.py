"""Hydra's launchers, which start the jobs of a sweep elsewhere, and its sweepers.

Help needs this module, so it imports no torch.
"""

import os
import signal
from types import FrameType

LAUNCHERS = {
    "joblib": "launchers",
    "ray": "ray",
    "submitit_local": "launchers",
    "submitit_slurm": "launchers",
}
"""The launchers that are tested, each with the extra of gradsurg that installs it."""
PLUG_INS = {
    "hydra/launcher": LAUNCHERS,
    "hydra/sweeper": {"optuna": "sweepers"},
}
"""The same for the groups of Hydra's plug-ins."""


def interrupt_at_time_limit() -> None:
    """Make the time limit of a submitit job a KeyboardInterrupt; do nothing in other processes.

    submitit's signal handler either requeues the job and exits, or raises an exception, which looks
    like an error of the run.
    """
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return
    number = getattr(signal, f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}")
    handler = signal.getsignal(number)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        assert callable(handler)  # submitit installs it before it calls the job
        try:
            handler(signum, frame)
        except Exception as error:  # whatever submitit's handler raises to end the job
            raise KeyboardInterrupt from error

    signal.signal(number, interrupt)
