"""List the module calls of a model in order, with the sites that a selector would hook."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradsurg.plugins.messages import nearest
from gradsurg.sites.base import GroupFn, Place, PlaceTest, RegisterHooks, Selector, SiteHook, Stage
from gradsurg.sites.call_tracker import Calls, tensors_in
from gradsurg.sites.combined import Selection
from gradsurg.sites.every_module import EveryModule
from gradsurg.sites.graph_tracer import CallGraph, Tracer, plain
from gradsurg.sites.selection import ROOT, inner_model, names_of, params_of
from gradsurg.sites.state_guard import copy_inputs, param_versions, untouched
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.sites.tree_table import Row, SiteLine, TensorSpec, Tree
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope

NOT_REACHED = "not met"


def tree(model: nn.Module, example_input: Any, at: Selector | None = None) -> Tree:
    """Return the module calls of `model` in order, with the sites that `at` would hook.

    `example_input` is the input of the model: a value, a tuple of several, or a dict of keyword
    arguments. The model runs once on a copy of it, and a second time with the hooks of `at`; there
    is no backward pass. Buffers, random states, gradients and hooks are restored. Raises
    LookupError, listing the choices, if nothing is selected.
    """
    if autograd.in_backward():
        raise RuntimeError("a tree takes a forward of its own: not inside a backward")
    model = inner_model(model)
    before = param_versions(model)
    loose: list[SiteLine] = []
    with compiling.uncompiled():
        walk = _walk(model, example_input)
        rows = [_row(call, walk) for call in walk.calls]
        if at is not None:
            with untouched(model):
                lines = _site_lines(model, example_input, at, walk, [row.label for row in rows])
            rows, loose = _assigned(rows, walk, lines)
    after = param_versions(model)
    changed = [name for name, version in after.items() if before.get(name) != version]
    return Tree(
        rows=tuple(rows),
        num_params=sum(param.numel() for param in model.parameters()),
        loose=tuple(loose),
        selected=at is not None,
        expected=None if at is None else at.count,
        notes=tuple(_notes(model, walk, at, changed)),
    )


@dataclass(slots=True)
class _Call:
    """A module call in the first forward."""

    module: nn.Module
    name: str
    number: int | None
    depth: int
    grads_on: bool = True
    again: bool = False
    output: tuple[tuple[str, TensorSpec | None], ...] = ()

    @property
    def label(self) -> str:
        return f"{self.name}#{self.number}"


@dataclass(slots=True)
class _Walk:
    """The calls and nodes of the first forward, without a selector."""

    names: dict[nn.Module, list[str]]
    calls: list[_Call] = field(default_factory=list)
    nodes: dict[str, Counter[str]] = field(default_factory=dict)  # by the call they were made in
    tensors: dict[str, TensorSpec | None] = field(default_factory=dict)  # by possible site
    edges: dict[str, list[str]] = field(default_factory=dict)  # node outputs that get a gradient
    has_graph: bool = False
    hides_nodes: bool = False

    def take(self, graph: CallGraph) -> None:
        """Record the nodes of an outermost call, and which of their outputs get a gradient."""
        self.has_graph = self.has_graph or not graph.empty
        self.hides_nodes = self.hides_nodes or graph.hides_nodes()
        nodes = list(graph.nodes())
        taken = {edge for node, _ in nodes for edge in node.next_functions}
        taken |= {returned.edge for returned in graph.returned}
        for node, place in nodes:
            self.nodes.setdefault(place.call.id, Counter())[_kind(place.name)] += 1
            site = place.id
            specs = [_spec(metadata) for metadata in node._input_metadata]
            self.tensors |= {f"{site}.{index}": spec for index, spec in enumerate(specs)}
            self.tensors[site] = specs[0]
            self.edges[site] = [
                f"{site}.{index}" for index in range(len(specs)) if (node, index) in taken
            ]


def _walk(model: nn.Module, example: Any) -> _Walk:
    """Run one forward and record its calls and nodes, then the modules that were not called."""
    walk = _Walk(names_of(model))
    open_calls: list[_Call] = []
    with untouched(model), ExitStack() as stack:
        calls, called = Calls(walk.names), set[nn.Module]()

        # Any: a user's keyword inputs
        def enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
            named = None if autograd.in_backward() else calls.next(module)
            if named is None:
                return
            call = _Call(module, *named, len(open_calls), torch.is_grad_enabled(), module in called)
            called.add(module)
            open_calls.append(call)
            walk.calls.append(call)
            single = len(args) == 1 and not kwargs
            inputs = args[0] if single else dict(enumerate(args)) | kwargs
            walk.tensors |= {f"{call.label}.input{path}": spec for path, spec in _specs(inputs)}

        def leave(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            if any(call.module is module for call in open_calls) and not autograd.in_backward():
                # A call that raised, and whose error the model has caught, is still open.
                while open_calls[-1].module is not module:
                    open_calls.pop()
                call = open_calls.pop()
                call.output = _specs(output)
                walk.tensors |= {f"{call.label}{path}": spec for path, spec in call.output}

        for module in walk.names:
            handle = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(leave).remove)
        calls.hook(model, stack)
        _uncompile(model, stack)
        Tracer().follow(model, list(walk.names), walk.take, stack, outputs=[model])
        try:
            _run(model, example)
        except Exception as error:  # any error of the user's forward gets a note and is re-raised
            if open_calls:
                error.add_note(f"in {open_calls[-1].label}, called with the example input")
            raise
    for module, names in walk.names.items():
        if module not in called and not _is_container(module):
            walk.calls.append(_Call(module, names[0], None, 0))
    return walk


def _site_lines(
    model: nn.Module, example: Any, at: Selector, walk: _Walk, labels: list[str]
) -> list[SiteLine]:
    """Run a forward with the hooks of `at`; return its sites, the hooked ones first.

    Raises LookupError, listing the calls, if nothing is selected.
    """
    at.find(model)
    scope: Scope = "tensor" if any(kind.stages for kind in at.kinds) else "group"
    stage = at.resolve(scope)
    recorder = _Recorder(Selection(at), model, stage, scope)
    if stage == "step":  # it is never stepped
        params = [*model.parameters()] or [torch.zeros(1, requires_grad=True)]
        recorder.steps.bind([torch.optim.SGD(params, lr=0.0)])
    with recorder.stack as stack:
        at.hook(recorder)
        recorder.running = True
        _uncompile(model, stack)
        _run(model, example)
    if not recorder.hooked and all(kind.known_before_forward for kind in at.kinds):
        # These selectors ask for the hooks of their sites only in a backward pass.
        recorder.hooked |= dict.fromkeys(at.find(model))
    params = {name: TensorSpec.of(param) for name, param in params_of(model).items()}
    lines = recorder.site_lines(walk.edges, params | walk.tensors)
    may_have_more = walk.hides_nodes or _reaches_outside(at)
    if not may_have_more and all(line.left_out == NOT_REACHED for line in lines):
        pattern = str(getattr(at, "pattern", "*"))
        raise LookupError(
            f"nothing that was called is selected by {at!r}. {nearest(pattern, labels)}"
        )
    return lines


class _HookedNode(NamedTuple):
    """A selected node by its site id, with the mechanism of its selector."""

    site: str
    mechanism: tuple[object, ...]


class _Recorder:
    """A `Attached` that records the sites it is asked for; its hooks change nothing."""

    needs_value = False
    may_skip = False
    stateful = ""
    unsteady = ""
    varies = ""
    acts_on_shards = True
    moment = None

    def __init__(self, test: PlaceTest, model: nn.Module, stage: Stage, scope: Scope) -> None:
        self._test = test
        self.model, self.stage, self.scope = model, stage, scope
        self.steps = OptimizerSteps()
        self.stack = ExitStack()
        self.running = False  # whether the forward has begun
        self.hooked: dict[str, TensorSpec | None] = {}
        self.left_out: dict[str, str] = {}
        self.expected: dict[str, bool] = {}  # and whether it was entered during the forward
        self.aliases: dict[str, str] = {}
        self.nodes: dict[_HookedNode, None] = {}

    def site_lines(
        self, edges: Mapping[str, list[str]], tensors: Mapping[str, TensorSpec | None]
    ) -> list[SiteLine]:
        """Return the recorded sites; `tensors` describes those that are known."""
        hooked = dict(self.hooked)
        shapeless = set[str]()
        by_node: dict[str, list[str]] = {}
        for site in hooked:
            by_node.setdefault(site[: site.rfind("]") + 1], []).append(site)
        for node, mechanism in self.nodes:
            sites = by_node.get(node, [])
            enters = mechanism[0] == "Nodes" and "enter" in mechanism
            if not enters:
                # A gradient that leaves a node is summed to the shape of its source afterwards.
                shapeless.update(sites)
            if not sites:
                # The hooks are asked for in backward, at the outputs that get a gradient.
                outputs = edges.get(node) if enters else None
                hooked |= dict.fromkeys(outputs or [f"{node}.*"])
        hooked |= {site: None for site, met in self.expected.items() if met and site not in hooked}
        left_out = dict.fromkeys(self.expected, NOT_REACHED) | self.left_out
        return [
            *(
                SiteLine(site, spec or (None if site in shapeless else tensors.get(site)))
                for site, spec in hooked.items()
            ),
            *(SiteLine(site, left_out=why) for site, why in left_out.items() if site not in hooked),
            *(
                SiteLine(alias, same_as=site)
                for alias, site in self.aliases.items()
                if alias not in hooked
            ),
        ]

    def selects(self, place: Place) -> bool | None:
        selected = self._test(place)
        if selected and place.whole and place.node is not None:
            site = f"{place.name}#{place.call}/{plain(place.node)}[{place.occurrence}]"
            self.nodes[_HookedNode(site, place.mechanism)] = None
        return selected

    def expect(
        self,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
        foreign: Sequence[str] = (),
    ) -> None:
        if skipped:
            self.left_out.setdefault(site, skipped)
        else:
            self.expected[site] = self.running
        for alias in aliases:
            self.aliases[alias] = site
            self.forget(alias)

    def forget(self, site: str) -> None:
        self.expected.pop(site, None)
        self.left_out.pop(site, None)

    def note(self, text: str) -> None:
        """Ignore a warning for the end of a block."""

    def register(self, register_hooks: RegisterHooks, stack: ExitStack) -> None:
        register_hooks(stack)

    def check_at_end(self, check: Callable[[], str]) -> None:
        """Ignore a check for the end of a block."""

    def hook_at(self, site: str, value: Callable[[], Tensor | None] | None = None) -> SiteHook:
        self.hooked.setdefault(site)

        def hook(
            grad: Tensor | None,
            value: Tensor | None = None,
            entering: tuple[Tensor | None, ...] = (),
        ) -> None:
            if grad is not None:  # an activation, as there is no backward pass
                self.hooked[site] = TensorSpec.of(grad)

        return hook

    def group_hook(
        self,
        sites: Sequence[str],
        values: Sequence[Callable[[], Tensor | None]],
        gradients: Sequence[Callable[[], Tensor | None]] = (),
        skip: Callable[[], None] | None = None,
    ) -> GroupFn:
        for site in sites:
            self.hooked.setdefault(site)
        return lambda grads: grads

    def on_shards(self, group: object, sizes: Mapping[str, int]) -> AbstractContextManager[None]:
        return nullcontext()

    def count_bytes(self, site: str, number: int) -> None:
        """Ignore bytes that were sent."""

    def state(self, key: str) -> dict[str, Tensor]:
        return {}


def _run(model: nn.Module, example: Any) -> None:  # Any: the inputs of a model
    example = copy_inputs(example)
    if isinstance(example, Mapping):
        model(**example)
    # A named tuple, such as a packed sequence, is a single input.
    elif isinstance(example, tuple) and not hasattr(example, "_fields"):
        model(*example)
    else:
        model(example)


def _uncompile(model: nn.Module, stack: ExitStack) -> None:
    """Run compiled modules eagerly: a compiled call does not show the calls inside it.

    Their attributes are restored by `untouched`.
    """
    for module in model.modules():
        if module._compiled_call_impl is not None:
            vars(module)["_compiled_call_impl"] = None
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        stack.enter_context(torch.compiler.set_stance("force_eager"))


def _is_container(module: nn.Module) -> bool:
    """Return whether a module only holds others, and so is never called."""
    return type(module).forward is nn.Module.forward and not list(module.parameters(recurse=False))


def _specs(value: object) -> tuple[tuple[str, TensorSpec | None], ...]:
    """Return the tensors in a value with their paths; the class of a value without tensors."""
    specs = tuple((path, TensorSpec.of(tensor)) for path, tensor in tensors_in(value, every=True))
    return specs or (() if value is None else ((type(value).__name__, None),))


def _spec(metadata: Any) -> TensorSpec | None:  # Any: PyTorch's class is private
    if metadata.is_nested_tensor:
        return None
    return TensorSpec(tuple(metadata.shape), metadata.dtype)


def _kind(node: str) -> str:
    return plain(node).removesuffix("Backward")


def _row(call: _Call, walk: _Walk) -> Row:
    return Row(
        name=call.name,
        call=call.number,
        depth=call.depth,
        kind=type(call.module).__name__,
        outputs=call.output,
        num_params=sum(param.numel() for param in call.module.parameters(recurse=False)),
        again=call.again,
        nodes=tuple(walk.nodes.get(call.label, {}).items()),
        no_grad=not call.grads_on,
    )


def _assigned(
    rows: Sequence[Row], walk: _Walk, lines: Sequence[SiteLine]
) -> tuple[list[Row], list[SiteLine]]:
    """Return the rows with their sites, and the sites without a row."""
    modules = {name: module for module, names in walk.names.items() for name in names}
    indices: dict[object, int] = {}  # by label and by module
    for index, (row, call) in enumerate(zip(rows, walk.calls, strict=True)):
        indices.setdefault(row.label, index)
        indices.setdefault(call.module, index)
    by_row: dict[int, list[SiteLine]] = {}
    loose = []
    for line in lines:
        call = re.match(r"([^#]*)#\d+", line.site)
        name = call[1] if call else line.site.rpartition(".")[0] or ROOT
        label = call[0] if call else None
        index = indices.get(label, indices.get(modules.get(name)))
        if index is None:
            loose.append(line)
        else:
            by_row.setdefault(index, []).append(line)
    return [
        replace(row, site_lines=tuple(by_row.get(index, ()))) for index, row in enumerate(rows)
    ], loose


def _reaches_outside(at: Selector | None) -> bool:
    return at is not None and any(isinstance(kind, EveryModule) for kind in at.kinds)


def _notes(model: nn.Module, walk: _Walk, at: Selector | None, changed: Sequence[str]) -> list[str]:
    notes = []
    output = next((call.output for call in walk.calls), ())
    if not walk.has_graph and any(param.requires_grad for param in model.parameters()):
        outputs = ", ".join(path for path, spec in output if spec is None)
        notes.append(f"no autograd node can be told: none leads to {outputs or 'what it returns'}")
    if walk.hides_nodes:
        notes.append("a reentrant checkpoint makes its nodes in the backward: not all are here")
    if _reaches_outside(at):
        notes.append("EveryModule meets modules outside the model too: they are not here")
    if changed:
        names = ", ".join(changed)
        notes.append(f"the forward has written to parameters, and they stay so: {names}")
    return notes
