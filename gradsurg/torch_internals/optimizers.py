"""Private functions of PyTorch for optimizers. Each has a test."""

from torch.optim import Optimizer


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """Whether the `step` of an optimizer runs hooks: `Optimizer.__init__` makes it do so."""
    has_tables = hasattr(optimizer, "_optimizer_step_pre_hooks")
    return has_tables and getattr(type(optimizer).step, "hooked", False)
