"""List the module calls of a model in order, with the sites that a selector would hook."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradsurg.plugins.messages import nearest
from gradsurg.sites.combined import Selection
from gradsurg.sites.every_module import EveryModule
from gradsurg.sites.graph_tracer import CallGraph, Tracer, plain
from gradsurg.sites.module_calls import Calls, tensors_in
from gradsurg.sites.places import GroupFn, Place, ReadTensor, Selector, SiteFn, Stage
from gradsurg.sites.selection import ROOT, inner_model, is_container, names_of, params_of
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
    walk, loose = _Walk(model), list[SiteLine]()
    with compiling.uncompiled():
        with untouched(model):
            walk.run(example_input)
        rows = [replace(row, nodes=tuple(walk.nodes[row.label].items())) for row in walk.rows]
        if at is not None:
            with untouched(model):
                lines = _site_lines(model, example_input, at, walk)
            rows, loose = _assigned(rows, walk, lines)
    after = param_versions(model)
    changed = [name for name, version in after.items() if before.get(name) != version]
    return Tree(
        rows=tuple(rows),
        num_params=sum(param.numel() for param in model.parameters()),
        loose=tuple(loose),
        changes="" if at is None else at.changed_tensors,
        expected=None if at is None else at.count,
        notes=tuple(_notes(walk, at, changed)),
    )


class _Walk:
    """The calls and nodes of a forward without a selector; `modules` are the rows' modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = names_of(model)
        self.rows: list[Row] = []
        self.modules: list[nn.Module] = []
        self.nodes: dict[str, Counter[str]] = {}  # by the call that they were made in
        self.tensors: dict[str, TensorSpec | None] = {}  # by possible site
        self.edges: dict[str, list[str]] = {}  # the outputs of each node that get a gradient
        self.has_graph = self.hides_nodes = False
        self._open: list[int] = []  # the rows of open calls

    def run(self, example: Any) -> None:  # Any: the inputs of a model
        """Run a forward, then add a row for each module that was not called."""
        with ExitStack() as stack:
            calls = Calls(self.names)
            enter, leave = self._hooks(calls)
            for module in self.names:
                handle = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(leave).remove)
            calls.hook(self.model, stack)
            Tracer().follow(self.model, list(self.names), self._take, stack, outputs=[self.model])
            try:
                _run(self.model, example, stack)
            except Exception as error:  # any error of the user's forward gets a note, re-raised
                if self._open:
                    label = self.rows[self._open[-1]].label
                    error.add_note(f"in {label}, called with the example input")
                raise
        called = {*self.modules}
        for module, (name, *_) in self.names.items():
            if module not in called and not (is_container(module) and not _own_size(module)):
                self._add(module, name, None, 0)
        self.nodes |= {row.label: Counter() for row in self.rows if row.label not in self.nodes}

    def _add(self, module: nn.Module, name: str, call: int | None, depth: int) -> None:
        row = Row(name, call, depth, type(module).__name__, num_params=_own_size(module))
        no_grad = call is not None and not torch.is_grad_enabled()
        self.rows.append(replace(row, again=module in self.modules, no_grad=no_grad))
        self.modules.append(module)

    def _hooks(self, calls: Calls) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the hooks before and after the call of a module."""

        # Any: a user's keyword inputs
        def enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
            named = None if autograd.in_backward() else calls.next(module)
            if named is None:
                return
            self._add(module, *named, len(self._open))
            self._open.append(len(self.rows) - 1)
            inputs = args[0] if len(args) == 1 and not kwargs else dict(enumerate(args)) | kwargs
            self._note_tensors(f"{self.rows[-1].label}.input", _specs(inputs))

        def leave(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            is_open = any(self.modules[index] is module for index in self._open)
            if not is_open or autograd.in_backward():
                return
            # A call that raised, and whose error the model has caught, is still open.
            while self.modules[self._open[-1]] is not module:
                self._open.pop()
            index = self._open.pop()
            row = self.rows[index] = replace(self.rows[index], outputs=_specs(output))
            self._note_tensors(row.label, row.outputs)

        return enter, leave

    def _note_tensors(self, site: str, specs: Sequence[tuple[str, TensorSpec | None]]) -> None:
        self.tensors |= {f"{site}{path}": spec for path, spec in specs}

    def _take(self, graph: CallGraph) -> None:
        """Record the nodes of an outermost call, and which of their outputs get a gradient."""
        self.has_graph = self.has_graph or not graph.empty
        self.hides_nodes = self.hides_nodes or graph.hides_nodes()
        nodes = list(graph.nodes())
        taken = {edge for node, _ in nodes for edge in node.next_functions}
        taken |= {returned.edge for returned in graph.returned}
        for node, place in nodes:
            site, kind = place.id, plain(place.name).removesuffix("Backward")
            self.nodes.setdefault(place.call.id, Counter())[kind] += 1
            specs = [
                None if one.is_nested_tensor else TensorSpec(tuple(one.shape), one.dtype)
                for one in autograd.outputs_of(node)
            ]
            self._note_tensors(site, [("", specs[0]), *((f".{i}", s) for i, s in enumerate(specs))])
            outputs = [index for index in range(len(specs)) if (node, index) in taken]
            self.edges[site] = [f"{site}.{index}" for index in outputs]


def _site_lines(model: nn.Module, example: Any, at: Selector, walk: _Walk) -> list[SiteLine]:
    """Run a forward with the hooks of `at`; return its sites, the hooked ones first.

    Raises LookupError, listing the calls, if nothing is selected.
    """
    at.find(model)
    scope: Scope = "tensor" if any(kind.stages for kind in at.kinds) else "group"
    recorder = _Recorder(Selection(at), model, at.resolve(scope), scope)
    if recorder.stage == "step":  # it is never stepped
        params = [*model.parameters()] or [torch.zeros(1, requires_grad=True)]
        recorder.steps.bind([torch.optim.SGD(params, lr=0.0)])
    with recorder.stack as stack:
        at.hook(recorder)
        recorder.running = True
        _run(model, example, stack)
    is_hooked = any(line.selected for line in recorder.lines.values())
    if not is_hooked and all(kind.known_before_forward for kind in at.kinds):
        # These selectors ask for the hooks of their sites only in a backward pass.
        for site in at.find(model):
            recorder.hook_at(site)
    params = {name: TensorSpec.of(param) for name, param in params_of(model).items()}
    lines = recorder.site_lines(walk.edges, params | walk.tensors)
    may_have_more = walk.hides_nodes or _reaches_outside(at)
    if not may_have_more and all(line.left_out == NOT_REACHED for line in lines):
        pattern = str(getattr(at, "pattern", "*"))
        labels = [row.label for row in walk.rows]
        raise LookupError(
            f"nothing that was called is selected by {at!r}. {nearest(pattern, labels)}"
        )
    return lines


@dataclass
class _Recorder:
    """An `Attached` that records the sites it is asked for; its hooks change nothing."""

    selection: Selection
    model: nn.Module
    stage: Stage
    scope: Scope
    steps: OptimizerSteps = field(default_factory=OptimizerSteps)
    stack: ExitStack = field(default_factory=ExitStack)
    running: bool = False  # whether the forward has begun
    lines: dict[str, SiteLine] = field(default_factory=dict)  # by site
    nodes: dict[tuple[str, bool], None] = field(default_factory=dict)  # and whether of side `enter`
    needs_value: bool = False
    needs_layer: bool = False
    may_skip: bool = False
    stateful: str = ""
    unsteady: str = ""
    varies: str = ""
    acts_on_shards: bool = True
    moment: object = None

    def site_lines(
        self, edges: Mapping[str, list[str]], tensors: Mapping[str, TensorSpec | None]
    ) -> list[SiteLine]:
        """Return the recorded sites; `tensors` describes those that are known."""
        by_node: dict[str, list[str]] = {}
        for site, line in self.lines.items():
            if line.selected:
                by_node.setdefault(site[: site.rfind("]") + 1], []).append(site)
        shapeless = set[str]()
        for node, enters in self.nodes:
            sites = by_node.get(node, [])
            if not enters:
                # A gradient that leaves a node is summed to the shape of its source afterwards.
                shapeless.update(sites)
            if not sites:
                # The hooks are asked for in backward, at the outputs that get a gradient.
                for site in (edges.get(node) if enters else None) or [f"{node}.*"]:
                    self.hook_at(site)
        lines = [
            replace(line, tensor=tensors.get(line.site))
            if line.selected and line.tensor is None and line.site not in shapeless
            else line
            for line in self.lines.values()
        ]
        return sorted(lines, key=lambda line: (not line.selected, bool(line.same_as)))

    def selects(self, place: Place) -> bool | None:
        selected = self.selection(place)
        if selected and place.whole and place.node is not None:
            site = f"{place.name}#{place.call}/{plain(place.node)}[{place.occurrence}]"
            enters = place.mechanism[0] == "Nodes" and "enter" in place.mechanism
            self.nodes[site, enters] = None
        return selected

    def expect(
        self,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
        foreign: Sequence[str] = (),
    ) -> None:
        known = self.lines.get(site)
        if self.running and not skipped:
            self.hook_at(site)
        elif known is None or (skipped and known.left_out == NOT_REACHED):
            self.lines[site] = SiteLine(site, left_out=skipped or NOT_REACHED)
        for alias in aliases:
            self.forget(alias)
            self.lines.setdefault(alias, SiteLine(alias, same_as=site))

    def forget(self, site: str) -> None:
        if site in self.lines and not self.lines[site].selected:
            del self.lines[site]

    def note(self, text: str) -> None:
        """Ignore a warning for the end of a block."""

    def check_at_end(self, check: Callable[[], str]) -> None:
        """Ignore a check for the end of a block."""

    def hook_at(self, site: str, value: ReadTensor | None = None) -> SiteFn:
        self.forget(site)
        self.lines.setdefault(site, SiteLine(site))

        def hook(
            grad: Tensor | None,
            value: Tensor | None = None,
            entering: tuple[Tensor | None, ...] = (),
            layer: object = None,
        ) -> None:
            if grad is not None:  # an activation, as there is no backward pass
                self.lines[site] = SiteLine(site, TensorSpec.of(grad))

        return hook

    def keeping_states(self, site: str) -> AbstractContextManager[None]:
        return nullcontext()

    def group_hook(
        self,
        sites: Sequence[str],
        values: Sequence[ReadTensor],
        gradients: Sequence[ReadTensor] = (),
        skip: Callable[[], None] | None = None,
    ) -> GroupFn:
        for site in sites:
            self.hook_at(site)
        return lambda grads: grads

    def on_shards(self, group: object, sizes: Mapping[str, int]) -> AbstractContextManager[None]:
        return nullcontext()

    def count_bytes(self, site: str, number: int) -> None:
        """Ignore bytes that were sent."""

    def state(self, key: str) -> dict[str, Tensor]:
        return {}


def _run(model: nn.Module, example: Any, stack: ExitStack) -> None:  # Any: the inputs of a model
    """Call the model with a copy of the example, and compiled modules in it eagerly.

    A compiled call does not show the calls inside it. `untouched` restores the attributes.
    """
    for module in model.modules():
        if compiling.is_compiled(module):
            vars(module)["_compiled_call_impl"] = None
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    example = copy_inputs(example)
    if isinstance(example, Mapping):
        model(**example)
    # A named tuple, such as a packed sequence, is a single input.
    elif isinstance(example, tuple) and not hasattr(example, "_fields"):
        model(*example)
    else:
        model(example)


def _own_size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters(recurse=False))


def _specs(value: object) -> tuple[tuple[str, TensorSpec | None], ...]:
    """Return the tensors in a value with their paths; the class of a value without tensors."""
    specs = tuple((path, TensorSpec.of(tensor)) for path, tensor in tensors_in(value, every=True))
    return specs or (() if value is None else ((type(value).__name__, None),))


def _assigned(
    rows: Sequence[Row], walk: _Walk, lines: Sequence[SiteLine]
) -> tuple[list[Row], list[SiteLine]]:
    """Return the rows with their sites, and the sites without a row."""
    modules = {name: module for module, names in walk.names.items() for name in names}
    indices: dict[object, int] = {}  # by label and by module
    for index, (row, module) in enumerate(zip(rows, walk.modules, strict=True)):
        indices.setdefault(row.label, index)
        indices.setdefault(module, index)
    by_row: dict[int | None, list[SiteLine]] = {}
    for line in lines:
        call = re.match(r"([^#]*)#\d+", line.site)
        name = call[1] if call else line.site.rpartition(".")[0] or ROOT
        index = indices.get(call and call[0], indices.get(modules.get(name)))
        by_row.setdefault(index, []).append(line)
    loose = by_row.pop(None, [])
    return [
        replace(row, site_lines=tuple(by_row.get(index, ()))) for index, row in enumerate(rows)
    ], loose


def _reaches_outside(at: Selector | None) -> bool:
    return at is not None and any(isinstance(kind, EveryModule) for kind in at.kinds)


def _notes(walk: _Walk, at: Selector | None, changed: Sequence[str]) -> list[str]:
    notes = []
    if not walk.has_graph and any(param.requires_grad for param in walk.model.parameters()):
        outputs = ", ".join(path for path, spec in walk.rows[0].outputs if spec is None)
        notes.append(f"no autograd node can be told: none leads to {outputs or 'what it returns'}")
    if walk.hides_nodes:
        notes.append("a reentrant checkpoint makes its nodes in the backward: not all are here")
    if _reaches_outside(at):
        notes.append("EveryModule meets modules outside the model too: they are not here")
    if changed:
        names = ", ".join(changed)
        notes.append(f"the forward has written to parameters, and they stay so: {names}")
    return notes
