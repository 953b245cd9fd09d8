"""Stub."""
from typing import ClassVar, Any
from gradsurg.plugins.fields import validated
from gradsurg.sites.selectors import ModuleSelector
@validated
class ModuleGradients(ModuleSelector):
    """Stub."""
    stages: ClassVar[Any] = ("backward",)
    def __post_init__(self): raise ValueError("stub")
    def kind_at(self, stage): raise ValueError("stub")
