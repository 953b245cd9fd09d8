"""The trajectories of the runs of each arm over the mean of the losses."""

from gradsurg.experiments.liu2021.figure import Chart, trajectories
from gradsurg.experiments.yu2020.task import PCGradToy

from gradsurg.report.study import Study


def chart(study: Study, point: str) -> Chart | None:
    return trajectories(study, point, lambda points: sum(PCGradToy().values(points)), 10)
