"""Step hooks belong to one optimizer, and see its step from outside."""

from gradsurg.core.pitfalls.base import Pitfall


class SeveralSteps(Pitfall):
    """A step hook is called once for a step in which LBFGS computes gradients many times.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> optimizer = torch.optim.LBFGS([weight])
    >>> handle = optimizer.register_step_pre_hook(lambda *_: print("step"))
    >>> def closure(): optimizer.zero_grad(); weight.exp().backward(); return weight.exp()
    >>> loss = optimizer.step(closure)  # calls the closure up to 25 times
    step

    https://docs.pytorch.org/docs/stable/generated/torch.optim.LBFGS.html
    """

    context, kinds, error = "LBFGS", "Parameters", ValueError
    why = "LBFGS also steps without gradients, so that no step of it can be skipped"
    instead = "Choose another optimizer"


class OwnCurvature(SeveralSteps):
    """LBFGS computes curvature from the difference of its weights and of their gradients."""

    kinds = "Updates MatchedUpdates"
    why = "cannot act on LBFGS, which computes curvature from its own updates"


class SeveralOptimizers(SeveralSteps):
    """The step of each optimizer ends before that of the next begins."""

    context, kinds = "several optimizers", "Updates MatchedUpdates Weights"
    why = "the transform needs a whole group at once, and two optimizers share it"
    instead = "Select the parameters of each in an intervention of its own"
