"""List the module calls of a model in order, with the sites that a selector would pick."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from gradsurg.plugins.messages import unknown
from gradsurg.sites.call_graphs import CallGraph, follow
from gradsurg.sites.calls import modules_of
from gradsurg.sites.node_names import plain
from gradsurg.sites.places import Selector, call_id
from gradsurg.sites.selection import ROOT, inner_model, is_container, names_of, params_by_name
from gradsurg.sites.state_guard import copy_inputs, param_versions, untouched
from gradsurg.sites.tensors import tensors_in
from gradsurg.sites.tree_door import NOT_REACHED, Notebook
from gradsurg.sites.tree_table import Row, SiteLine, TensorSpec, Tree
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope


def tree(model: nn.Module, example_input: Any, at: Selector | None = None) -> Tree:
    """Return the module calls of `model` in order, with the sites that `at` would pick.

    `example_input` is the input of the model: a value, a tuple of several, or a dict of keyword
    arguments. The model runs once on a copy of it, and a second time with the hooks of `at`; there
    is no backward pass. Buffers, random states, gradients and hooks are restored.

    Raises LookupError, listing the choices, if nothing is selected.
    """
    if autograd.in_backward():
        raise RuntimeError("call gs.tree before or after the backward pass: it runs the model")
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
        self.model, self.names = model, names_of(model)
        self.door = Notebook(model)
        self.thread = self.door.shared.follow(self.door.stack)
        self.rows: list[Row] = []
        self.modules: list[nn.Module] = []
        self.nodes = defaultdict[str, Counter[str]](Counter)  # by the call that they were made in
        self.tensors: dict[str, TensorSpec | None] = {}  # by possible site
        self.edges: dict[str, list[str]] = {}  # the outputs of each node that get a gradient
        self.has_graph = self.hides_nodes = False
        # Functions that have called modules without gradients, as reentrant checkpoints do.
        self._repeating: WeakSet[BackwardCFunction] = WeakSet()

    def run(self, example: Any) -> None:  # Any: the inputs of a model
        """Run a forward, then add a row for each module that was not called."""
        door, running = self.door, self.thread.calls.running
        enter, leave = self._enter, self._leave
        try:
            for module in self.names:
                handle = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                door.stack.callback(handle.remove)
                door.stack.callback(module.register_forward_hook(leave).remove)
            follow(door, modules_of(self.model), door.shared, self._take, [self.model])
            _run(door, example)
        except Exception as error:  # any error of the user's forward gets a note, re-raised
            if running:
                label = self.rows[running[-1][1]].label
                error.add_note(f"in {label}, called with the example input")
            raise
        finally:
            door.close()
        called = {*self.modules}
        for module, (name, *_) in self.names.items():
            if module not in called and (_own_size(module) or not is_container(module)):
                self._add(module, name, None, 0)

    def _add(self, module: nn.Module, name: str, call: int | None, depth: int) -> None:
        row = Row(name, call, depth, type(module).__name__, num_params=_own_size(module))
        no_grad = call is not None and not torch.is_grad_enabled()
        self.rows.append(replace(row, again=module in self.modules, no_grad=no_grad))
        self.modules.append(module)

    # Any: a user's keyword inputs
    def _enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        calls = self.thread.calls
        named = None if autograd.in_backward() else calls.next(module)
        if named is None:
            return
        if not torch.is_grad_enabled():
            self._repeating.update(autograd.running_functions())
        self._add(module, *named, len(calls.running))
        calls.enter(module, len(self.rows) - 1)
        inputs = args[0] if len(args) == 1 and not kwargs else dict(enumerate(args)) | kwargs
        self._note_tensors(f"{self.rows[-1].label}.input", _specs(inputs))

    def _leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        index = None if autograd.in_backward() else self.thread.calls.leave(module)
        if index is not None:
            row = self.rows[index] = replace(self.rows[index], outputs=_specs(output))
            self._note_tensors(row.label, row.outputs)

    def _note_tensors(self, site: str, specs: Sequence[tuple[str, TensorSpec | None]]) -> None:
        self.tensors |= {f"{site}{path}": spec for path, spec in specs}

    def _take(self, graph: CallGraph) -> None:
        """Record the nodes of an outermost call, and which of their outputs get a gradient."""
        nodes = [node for _, node in graph.reached]
        self.has_graph = self.has_graph or bool(nodes)
        self.hides_nodes = self.hides_nodes or any(node in self._repeating for node in nodes)
        taken = {edge for node in nodes for edge in node.next_functions}
        taken |= {returned.edge for returned in graph.returned}
        for index, name, call, occurrence in graph.made():
            node, label = nodes[index], call_id(*call)
            site = f"{label}/{plain(name)}[{occurrence}]"
            self.nodes[label][plain(name).removesuffix("Backward")] += 1
            specs = [
                None if one.is_nested_tensor else TensorSpec(tuple(one.shape), one.dtype)
                for one in autograd.outputs_of(node)
            ]
            self._note_tensors(site, [("", specs[0]), *((f".{i}", s) for i, s in enumerate(specs))])
            outputs = [number for number in range(len(specs)) if (node, number) in taken]
            self.edges[site] = [f"{site}.{number}" for number in outputs]


def _site_lines(model: nn.Module, example: Any, at: Selector, walk: _Walk) -> list[SiteLine]:
    """Run a forward with the hooks of `at`; return its sites, the hooked ones first.

    Raises LookupError, listing the calls, if nothing is selected.
    """
    scope: Scope = "tensor" if any(leaf.stages for leaf in at.leaves) else "group"
    door = Notebook(model, at, at.resolve(scope))
    if door.memory.stage == "step":  # it is never stepped
        params = [*model.parameters()] or [torch.zeros(1, requires_grad=True)]
        door.steps.bind([torch.optim.SGD(params, lr=0.0)])
    try:
        door.watch()
        _run(door, example)
        lines = _with_nodes(door, walk)
    finally:
        door.close()
    may_have_more = walk.hides_nodes or _reaches_outside(at)
    if not may_have_more and all(line.left_out == NOT_REACHED for line in lines):
        if type(at).nothing_met is not Selector.nothing_met and door.memory.rejected:
            error = at.nothing_met(door.memory, may_meet_nodes=False)
            assert error is not None
            raise error
        fault = f"nothing that was called is selected by {at!r}"
        labels = [row.label for row in walk.rows]
        raise LookupError(unknown(fault, str(getattr(at, "pattern", "*")), labels))
    return lines


def _with_nodes(door: Notebook, walk: _Walk) -> list[SiteLine]:
    """The sites that were written down, those of nodes that are known in a backward pass alone,
    and those not met; the tensors that are known from the forward are described.
    """
    params = {name: TensorSpec.of(param) for name, param in params_by_name(door.model).items()}
    tensors, by_node = params | walk.tensors, dict[str, list[str]]()
    for site, line in door.lines.items():
        if line.selected:
            by_node.setdefault(site[: site.rfind("]") + 1], []).append(site)
    shapeless = set[str]()
    for node, enters in door.nodes.items():
        sites = by_node.get(node, [])
        if not enters:
            # A gradient that leaves a node is summed to the shape of its source afterwards.
            shapeless.update(sites)
        elif not sites:
            # The hooks are asked for in backward, at the outputs that get a gradient.
            for site in walk.edges.get(node) or [f"{node}.*"]:
                door.write(site)
    lines = {line.site: line for line in door.not_met()} | door.lines
    for site, line in lines.items():
        if line.selected and line.tensor is None and site not in shapeless:
            lines[site] = replace(line, tensor=tensors.get(site))
    return sorted(lines.values(), key=lambda line: (not line.selected, bool(line.same_as)))


def _run(door: Notebook, example: Any) -> None:  # Any: the inputs of a model
    """Call the model with a copy of the example, and compiled modules in it eagerly.

    A compiled call does not show the calls inside it. `untouched` restores the attributes.
    """
    model = door.model
    door.shared.renew()
    for module in model.modules():
        if compiling.is_compiled(module):
            vars(module)["_compiled_call_impl"] = None
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        door.stack.enter_context(torch.compiler.set_stance("force_eager"))
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
    """Whether a selector also picks modules outside the model."""
    return at is not None and any(leaf.kind_at(None).name == "EveryModule" for leaf in at.leaves)


def _notes(walk: _Walk, at: Selector | None, changed: Sequence[str]) -> list[str]:
    notes = []
    if not walk.has_graph and any(param.requires_grad for param in walk.model.parameters()):
        outputs = ", ".join(path for path, spec in walk.rows[0].outputs if spec is None)
        notes.append(f"no autograd node is known: none leads to {outputs or 'what it returns'}")
    if walk.hides_nodes:
        notes.append("nodes that a reentrant checkpoint makes in the backward pass are not listed")
    if _reaches_outside(at):
        notes.append("EveryModule also acts at modules outside the model, which are not listed")
    if changed:
        names = ", ".join(changed)
        notes.append(f"the forward has changed parameters, which were not restored: {names}")
    return notes
