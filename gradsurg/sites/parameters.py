"""Parameters: the gradient of each parameter."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar
from weakref import ref

from torch.optim import Optimizer

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.sites._grads import access_to, actor, hook_accumulated, hook_steps
from gradsurg.sites.backward_end import hook_backward_ends
from gradsurg.sites.base import Attached, Stage
from gradsurg.sites.selection import ParamSelector, all_frozen, expect_params, selected_params
from gradsurg.sites.step_hooks import Params, StepActions
from gradsurg.transforms.base import Need


@validated
class Parameters(ParamSelector):
    """The gradients of the parameters whose name fits `pattern`, a glob or `re:`.

    Stages: `backward`, the gradient of one backward pass before it is added to `.grad` (the default
    of tensor transforms); `accumulated`, the running sum in `.grad` after each backward pass;
    `backward_end`, all `.grad`s at the end of a backward pass; `step`, the unscaled and accumulated
    gradient that the optimizer is about to use (the default of group transforms).

    `types` is a pattern on the class of the module that owns the parameter; `depth`, `index`,
    `ndim` and `size` (its number of entries) are a number or a pair (lowest, highest). A tied
    parameter is one site with several names. A frozen parameter is skipped and reported in the
    ledger.

    At `step` the parameters are those that fit and that the optimizers hold at each step, also
    frozen ones that are trained later. A group transform acts on those of all optimizers before
    the first of them steps.

    At `backward_end` a transform needs no optimizer. It acts on the parameters that the pass has
    reached; an older `.grad` of others is left alone. After a nested backward pass (reentrant
    checkpoint) nothing is done: its parameters join the outer pass. The same holds after
    `autograd.grad`, which adds to no `.grad`, or a backward pass that raises. Warnings on detach
    report gradients added before the exception, and an optimizer that steps and clears `.grad`
    inside the backward pass. In DistributedDataParallel it acts after the average, on all
    parameters, and not in a backward pass of `no_sync` or one that does not reach the output of the
    model.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward", "accumulated", "backward_end", "step")
    group_stages: ClassVar[tuple[Stage, ...]] = ("step", "backward_end")

    def __post_init__(self) -> None:
        if self.stage == "reduced":
            raise Contradiction("stage", "Parameters has no 'reduced' any more: use 'backward_end'")

    @property
    def provides(self) -> frozenset[Need]:
        can_skip = self.stage != "backward_end"
        return frozenset({"value", "examples", "skip"} if can_skip else {"value", "examples"})

    def hook(self, attached: Attached) -> None:
        stage = attached.stage
        if stage == "step":
            hook_steps(self, attached, partial(self._step_actions, attached), joint=True)
            return
        params = expect_params(self, attached.model, attached, takes_shards=stage == "accumulated")
        if not params:
            selected = selected_params(self, attached.model, attached.selects)
            raise all_frozen(self, [names[0] for _, names in selected])
        if stage == "accumulated":
            hook_accumulated(params, attached, access_to(self, params, attached))
        elif stage == "backward_end":
            hook_backward_ends(params, attached)
        else:
            for name, param in params.items():
                hook = attached.hook_at(name, ref(param))
                attached.stack.callback(param.register_hook(hook).remove)

    def _step_actions(
        self, attached: Attached, params: Params, optimizers: Sequence[Optimizer]
    ) -> StepActions:
        skip = partial(attached.steps.skip, optimizers)
        act = actor(params, attached, access_to(self, params, attached), skip)
        return StepActions(before=partial(act, [*params.values()]))
