"""Hydra's launchers, which start the jobs of a sweep elsewhere, and its sweepers, which list them.

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


def sweeper_fault(name: str) -> str:
    """Return the error for a sweeper other than Hydra's own.

    Others choose each job by the results of earlier ones, so that no job is checked before.
    """
    return (
        f"hydra/sweeper: must be basic, found '{name}'; to search for values use tune= or "
        "`wandb sweep` (docs/sweeps.md)"
    )


def interrupt_at_time_limit() -> None:
    """Make the time limit of a submitit job a KeyboardInterrupt; do nothing in other processes.

    submitit's signal handler either requeues the job and exits, or raises an exception, which a
    run would take for its own.
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
