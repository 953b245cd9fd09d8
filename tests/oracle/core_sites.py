"""Every kind of site and stage, in the spellings of both sides."""

from collections.abc import Callable
from typing import Any

import gradsurg as gs

At = Callable[[], Any]  # Any: a selector, whose base class has another home on each side


def backward_end() -> Any:  # Any: see At
    """All `.grad`s at the end of a backward pass: kind `Group`, later a stage of `Parameters`."""
    if hasattr(gs, "Group"):
        return gs.Group()
    return gs.Parameters(stage="backward_end")


def reduced() -> Any:  # Any: see At
    """The same, averaged by DDP: stage `reduced`, later part of stage `backward_end`."""
    try:
        return gs.Parameters(stage="reduced")
    except ValueError:
        return gs.Parameters(stage="backward_end")


KINDS: dict[str, At] = {
    "Parameters backward": lambda: gs.Parameters(),
    "Parameters accumulated": lambda: gs.Parameters(stage="accumulated"),
    "Parameters reduced": reduced,
    "Parameters step": lambda: gs.Parameters(stage="step"),
    "Group backward_end": backward_end,
    "Buckets sent": lambda: gs.Buckets(),
    "Buckets reduced": lambda: gs.Buckets(stage="reduced"),
    "Outputs": lambda: gs.Outputs("*"),
    "Inputs branch": lambda: gs.Inputs("*"),
    "Inputs total": lambda: gs.Inputs("*", path="total"),
    "Nodes enter": lambda: gs.Nodes("activation"),
    "Nodes leave": lambda: gs.Nodes("matmul", side="leave"),
    "ModuleGradients pre": lambda: gs.ModuleGradients("*"),
    "ModuleGradients": lambda: gs.ModuleGradients("*", kind="full_backward"),
    "EveryModule forward_pre": lambda: gs.EveryModule(types="Linear", kind="forward_pre"),
    "EveryModule forward": lambda: gs.EveryModule(types="Linear"),
    "EveryModule backward_pre": lambda: gs.EveryModule(kind="full_backward_pre"),
    "EveryModule backward": lambda: gs.EveryModule(kind="full_backward"),
    "Activations": lambda: gs.Activations("*"),
    "Activations input": lambda: gs.Activations(types="Linear", side="input"),
    "Activations straight": lambda: gs.Activations("*", backward="straight"),
    "Weights step": lambda: gs.Weights(),
    "Weights forward": lambda: gs.Weights(stage="forward"),
    "Updates": lambda: gs.Updates(),
    "SavedTensors": lambda: gs.SavedTensors("*"),
    "SavedTensors node": lambda: gs.SavedTensors("*", node="matmul"),
    "SavedTensors block": lambda: gs.SavedTensors("block"),
    "SavedTensors parameters": lambda: gs.SavedTensors("*", of="parameters"),
    "Uses modules": lambda: gs.Uses("*_?"),
    "Uses parameters": lambda: gs.Uses("*weight*"),
    "Captured": lambda: gs.Captured(),
    "Combined": lambda: gs.Parameters("*bias*") | gs.Outputs(types="Linear"),
}

SELECTIONS: dict[str, At] = {
    "glob": lambda: gs.Parameters("*.weight"),
    "expression": lambda: gs.Parameters(r"re:lin_[ab]\..*"),
    "types": lambda: gs.Parameters(types="Linear"),
    "class": lambda: gs.Parameters(types="Module"),
    "ndim": lambda: gs.Parameters(ndim=(1, 1)),
    "size": lambda: gs.Parameters(size=(9, 1000)),
    "depth of parameters": lambda: gs.Parameters(depth=2),
    "index of parameters": lambda: gs.Parameters(index=0),
    "and": lambda: gs.Parameters() & gs.Parameters("lin_*"),
    "and not": lambda: gs.Parameters() & ~gs.Parameters("*.bias"),
    "or": lambda: gs.Parameters("lin_a.*") | gs.Parameters("lin_c.*"),
    "other stages": lambda: gs.Parameters("lin_a.*") | gs.Parameters("lin_c.*", stage="step"),
    "first": lambda: gs.Outputs("*").first(2),
    "first of a combination": lambda: (gs.Outputs("lin_*") | gs.Inputs("act_*")).first(3),
    "expect": lambda: gs.Parameters("lin_?.weight").expect(3),
    "expect too many": lambda: gs.Parameters("*.weight").expect(30),
    "expect outputs": lambda: gs.Outputs(types="ReLU").expect(2),
    "where": lambda: gs.Parameters().where(lambda place: place.name.endswith("t")),
    "where outputs": lambda: gs.Outputs("*").where(lambda place: place.call != 1),
    "second call": lambda: gs.Outputs("*", call=1),
    "second call of inputs": lambda: gs.Inputs("*", call=1),
    "call or call": lambda: gs.Outputs("lin_b", call=1) | gs.Outputs("lin_b", call=0),
    "not a type": lambda: gs.Outputs("*") & ~gs.Outputs(types="Linear"),
    "depth of modules": lambda: gs.Outputs("*", depth=(1, 2)),
    "root": lambda: gs.Outputs("root"),
    "root or all": lambda: gs.Outputs("root") | gs.Outputs("*"),
    "node of a module": lambda: gs.Nodes("Addmm", module="lin_b"),
    "edge": lambda: gs.Nodes("Addmm", side="leave", edge=1),
    "occurrence": lambda: gs.Nodes("*", module="root", occurrence=0),
    "call of a node": lambda: gs.Nodes("Addmm", module="lin_b", call=1),
    "types of a node": lambda: gs.Nodes("*", types="ReLU"),
    "every node": lambda: gs.Nodes("*"),
    "overload": lambda: gs.Nodes("AddBackward0"),
    "second use": lambda: gs.Uses("*", use=1),
    "use of the model": lambda: gs.Uses("root"),
    "saved by a type": lambda: gs.SavedTensors(types="ReLU"),
    "all saved": lambda: gs.SavedTensors("*", of="all"),
    "node saves": lambda: gs.SavedTensors("*", node="Relu"),
    "captured weights": lambda: gs.Captured("*.weight", ndim=2),
    "losses": lambda: gs.EveryModule(types="CrossEntropyLoss", kind="full_backward_pre"),
    "sent by fp16": lambda: gs.Buckets(reduce="fp16"),
    "no match": lambda: gs.Parameters("lin_x.*"),
    "no module": lambda: gs.Outputs(types="Conv9d"),
    "no node": lambda: gs.Nodes("Tanhh"),
    "one part without a match": lambda: gs.Outputs("lin_a") | gs.Outputs("lin_a", call=5),
}
