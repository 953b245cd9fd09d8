"""The trajectories of the second counter-example over its loss."""

from gradsurg.experiments.karimireddy2019.task import AbsoluteToy
from gradsurg.experiments.liu2021.figure import Chart, trajectories

from gradsurg.report.study import Study


def chart(study: Study, point: str) -> Chart | None:
    return trajectories(study, point, AbsoluteToy().values, 1.5)
