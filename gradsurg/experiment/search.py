"""A search: a sweeper such as optuna's chooses each job by the results of earlier ones.

A job of it is a trial: it is checked, planned and trained as a command without a sweep, and returns
its metric on validation data. The report compares no trials.
"""

from collections.abc import Mapping
from math import inf
from statistics import fmean

from gradsurg.experiment.command import Command
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.job import train
from gradsurg.experiment.run_directory import ENDED, RunDirectory
from gradsurg.experiment.runs import Experiment
from gradsurg.experiment.settings import Config
from gradsurg.experiment.trial_step import few_examples, metric_names
from gradsurg.experiment.tuning import score, tuning_metric
from gradsurg.torch_internals import random_state


def search_metric(experiment: Experiment) -> Mapping[str, object]:
    """Return the metric that a search is about, and whether it is `lower` that is better.

    It is the verdict's metric, on validation data. Raises ConfigError if there is none.
    """
    settings = experiment.settings
    if not settings.set_aside:
        text = "a search chooses on validation data: give their share, as validation=0.2"
        raise ConfigError([f"validation: {text}"])
    with random_state.preserved():
        data = experiment.task.load_with_validation(settings.set_aside)
        names = metric_names(experiment.task, experiment.make_model(data), *few_examples(data))
    try:
        metric, lower = tuning_metric(settings, names)
    except ValueError as error:
        raise ConfigError([f"metric: {error}"]) from error
    return {"metric": metric, "lower": lower}


def trial(words: list[str], config: Config) -> float | None:
    """Check, plan and train a trial; return the mean of its metric over its seeds.

    A trial of which a run has diverged is worse than all others: infinite, as not all sweepers take
    NaN. None if a run failed. Raises ConfigError.
    """
    command = Command()
    experiment = command.add(words, config)
    command.search = search = search_metric(experiment)
    command.plan()
    train(experiment, words, in_sweep=True)
    metric, worst = str(search["metric"]), inf if search["lower"] else -inf
    runs = [pair.treated or pair.control for pair in experiment.compared or ()]
    places = [RunDirectory(run.directory(experiment.settings.out_folder)) for run in runs if run]
    if not places or any(place.recorded_state not in ENDED for place in places):
        return None
    scores = [score(place.read_summary(), metric) for place in places]
    return worst if None in scores else fmean(each for each in scores if each is not None)
