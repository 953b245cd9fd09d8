"""List a model's module calls in running order, with the sites that a selector selects."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradsurg.plugins.fields import nearest
from gradsurg.sites.base import GroupFn, Place, PlaceTest, RegisterHooks, Selector, SiteHook, Stage
from gradsurg.sites.call_tracker import Calls, tensors_in
from gradsurg.sites.every_module import EveryModule
from gradsurg.sites.graph_tracer import CallGraph, Tracer, plain
from gradsurg.sites.selection import ROOT, names_of, params_of
from gradsurg.sites.state_guard import copied, untouched, versions
from gradsurg.sites.tree_table import Row, SiteLine, TensorSpec, Tree
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Scope

ERRORS = Exception  # whatever a forward raises: it gets a note and is raised again


def tree(model: nn.Module, example_input: Any, at: Selector | None = None) -> Tree:
    """The modules of `model` in the order in which they run, and what `at` would hook.

    `example_input` is what the model takes: a value, a tuple of several, or a dict of keyword
    inputs. The model runs once on a copy of it, and once more to see what `at` meets; nothing of
    that stays behind: no statistics, random numbers, gradients, hooks. There is no backward. Raises
    LookupError, with what there is, if nothing is selected. (Any: the inputs of a model.)
    """
    if autograd.in_backward():
        raise RuntimeError("a tree takes a forward of its own: not inside a backward")
    model = getattr(model, "_orig_mod", model)
    before = versions(model)
    walk = _walked(model, example_input)
    rows = [_row(call, walk) for call in walk.calls]
    loose: list[SiteLine] = []
    if at is not None:

        def forward(stack: ExitStack) -> None:
            _uncompile(model, stack)
            _run(model, example_input)

        with untouched(model):
            more = walk.hides or _reaches_out(at)
            seen = Seen([row.label for row in rows], walk.tensors, walk.edges, more)
            site_lines = marked(model, at, forward, seen)
        rows, loose = _placed(rows, walk, site_lines)
    changed = [name for name, version in versions(model).items() if before.get(name) != version]
    return Tree(
        rows=tuple(rows),
        num_params=sum(param.numel() for param in model.parameters()),
        loose=tuple(loose),
        selected=at is not None,
        expected=None if at is None else at.expected,
        notes=tuple(_notes(model, walk, at, changed)),
    )


@dataclass(slots=True)
class _Call:
    """A call of a module, as it was seen."""

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
    """What a forward has shown."""

    names: Mapping[nn.Module, Sequence[str]]
    calls: list[_Call] = field(default_factory=list)
    nodes: dict[str, Counter[str]] = field(default_factory=dict)  # by the call they were made in
    tensors: dict[str, TensorSpec | None] = field(default_factory=dict)  # of what could be a site
    edges: dict[str, list[str]] = field(default_factory=dict)
    told: bool = False  # whether there was a graph to tell of
    hides: bool = False

    def take(self, graph: CallGraph) -> None:
        """Note down the nodes of the model's call, and which of their outputs get a gradient."""
        self.told = self.told or not graph.empty
        self.hides = self.hides or graph.hides_nodes()
        made = list(graph.nodes())
        taken = {edge for node, _ in made for edge in node.next_functions}
        taken |= {returned.edge for returned in graph.returned}
        for node, spot in made:
            self.nodes.setdefault(spot.call.id, Counter())[_short(spot.name)] += 1
            site = spot.id
            tensors = [_like(given) for given in node._input_metadata]
            self.tensors |= {f"{site}.{index}": tensor for index, tensor in enumerate(tensors)}
            self.tensors[site] = tensors[0]
            self.edges[site] = [
                f"{site}.{index}" for index in range(len(tensors)) if (node, index) in taken
            ]


def _walked(model: nn.Module, example: Any) -> _Walk:
    """One forward, with the calls and the nodes in it, and all modules that it leaves out."""
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
            alone = len(args) == 1 and not kwargs
            given = args[0] if alone else dict(enumerate(args)) | kwargs
            walk.tensors |= {f"{call.label}.input{path}": tensor for path, tensor in _shapes(given)}

        def leave(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            if any(call.module is module for call in open_calls) and not autograd.in_backward():
                # What a model's own `except` has caught is still open above it.
                while open_calls[-1].module is not module:
                    open_calls.pop()
                call = open_calls.pop()
                call.output = _shapes(output)
                walk.tensors |= {f"{call.label}{path}": tensor for path, tensor in call.output}

        for module in walk.names:
            handle = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(leave).remove)
        calls.hook(model, stack)
        _uncompile(model, stack)
        Tracer().follow(model, list(walk.names), walk.take, stack, outputs=[model])
        try:
            _run(model, example)
        except ERRORS as error:
            if open_calls:
                error.add_note(f"in {open_calls[-1].label}, called with the example input")
            raise
    for module, names in walk.names.items():
        if module not in called and not _is_container(module):
            walk.calls.append(_Call(module, names[0], None, 0))
    return walk


def _run(model: nn.Module, example: Any) -> None:  # Any: the inputs of a model
    example = copied(example)
    if isinstance(example, Mapping):
        model(**example)
    # A named tuple, as a packed sequence is one, is one input.
    elif isinstance(example, tuple) and not hasattr(example, "_fields"):
        model(*example)
    else:
        model(example)


def _uncompile(model: nn.Module, stack: ExitStack) -> None:
    """Have modules run eagerly that are compiled: a compiled call shows nothing of what is inside.

    Their attributes are put back with the others.
    """
    for module in model.modules():
        if module._compiled_call_impl is not None:
            vars(module)["_compiled_call_impl"] = None
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        stack.enter_context(torch.compiler.set_stance("force_eager"))


def _is_container(module: nn.Module) -> bool:
    """Whether it only holds modules: it is never called, and has nothing of its own."""
    return type(module).forward is nn.Module.forward and not list(module.parameters(recurse=False))


def _shapes(value: object) -> tuple[tuple[str, TensorSpec | None], ...]:
    """The tensors in a value, each with its path; of what holds none the class."""
    found = tuple((path, TensorSpec.of(tensor)) for path, tensor in tensors_in(value, every=True))
    return found or (() if value is None else ((type(value).__name__, None),))


def _like(
    given: Any,
) -> TensorSpec | None:  # Any: the class of what a node says of a tensor is hidden
    return None if given.is_nested_tensor else TensorSpec(tuple(given.shape), given.dtype)


def _short(name: str) -> str:
    return plain(name).removesuffix("Backward")


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


def _placed(
    rows: Sequence[Row], walk: _Walk, site_lines: Sequence[SiteLine]
) -> tuple[list[Row], list[SiteLine]]:
    """The rows with their marks, and the marks that have no row."""
    modules = {name: module for module, names in walk.names.items() for name in names}
    labels: dict[object, int] = {}
    for index, (row, call) in enumerate(zip(rows, walk.calls, strict=True)):
        labels.setdefault(row.label, index)
        labels.setdefault(call.module, index)
    held: dict[int, list[SiteLine]] = {}
    loose = []
    for line in site_lines:
        call = re.match(r"([^#]*)#\d+", line.site)
        name = call[1] if call else line.site.rpartition(".")[0] or ROOT
        label = call[0] if call else None
        place = labels.get(label, labels.get(modules.get(name)))
        if place is None:
            loose.append(line)
        else:
            held.setdefault(place, []).append(line)
    return [
        replace(row, site_lines=tuple(held.get(index, ()))) for index, row in enumerate(rows)
    ], loose


def _reaches_out(at: Selector | None) -> bool:
    return at is not None and any(isinstance(kind, EveryModule) for kind in at.kinds)


def _notes(model: nn.Module, walk: _Walk, at: Selector | None, changed: Sequence[str]) -> list[str]:
    notes = []
    output = next((call.output for call in walk.calls), ())
    if not walk.told and any(param.requires_grad for param in model.parameters()):
        what = ", ".join(path for path, tensor in output if tensor is None) or "what it returns"
        notes.append(f"no autograd node can be told: none leads to {what}")
    if walk.hides:
        notes.append("a reentrant checkpoint makes its nodes in the backward: not all are here")
    if _reaches_out(at):
        notes.append("EveryModule meets modules outside the model too: they are not here")
    if changed:
        names = ", ".join(changed)
        notes.append(f"the forward has written to parameters, and they stay so: {names}")
    return notes


NOT_MET = "not met"


class Seen(NamedTuple):
    """What a forward without a selection has shown.

    `calls` are the names of its calls, `likes` is what its sites would pass, `edges` the outputs of
    each node that get a gradient. There may be `more` sites, that no forward of the model shows.
    """

    calls: list[str]
    tensors: Mapping[str, TensorSpec | None]
    edges: Mapping[str, list[str]]
    more: bool


def marked(
    model: nn.Module,
    at: Selector,
    forward: Callable[[ExitStack], None],
    seen: Seen,
) -> list[SiteLine]:
    """What `at` selects in another `forward`, what is hooked first.

    Raises LookupError, with what there is, if nothing is selected.
    """
    at.find(model)
    stage, scope = _stage(at)
    recorder = _Recorder(at.new_test())
    optimizer = None
    if stage == "step":  # which never comes
        params = [*model.parameters()] or [torch.zeros(1, requires_grad=True)]
        optimizer = torch.optim.SGD(params, lr=0.0)
    with ExitStack() as stack:
        at.hook(model, optimizer, stage, scope, recorder, stack)
        recorder.running = True
        forward(stack)
    if not recorder.hits and all(kind.known_before_forward for kind in at.kinds):
        recorder.hits |= dict.fromkeys(at.find(model))  # its gates are asked for in a backward
    named = params_of(model)
    tensors = {name: TensorSpec.of(param) for name, param in named.items()} | dict(seen.tensors)
    site_lines = recorder.site_lines(seen.edges, tensors)
    if not seen.more and all(line.left_out == NOT_MET for line in site_lines):
        pattern = str(getattr(at, "pattern", "*"))
        raise LookupError(
            f"nothing that was called is selected by {at!r}. {nearest(pattern, seen.calls)}"
        )
    return site_lines


def _stage(at: Selector) -> tuple[Stage, Scope]:
    scope: Scope = "tensor" if any(kind.stages for kind in at.kinds) else "group"
    return at.resolve(scope), scope


class _Recorder:
    """The gates of a surgery that does nothing but note down what was asked of it."""

    needs_value = False
    stateful = ""
    unsteady = ""
    moment = None

    def __init__(self, test: PlaceTest) -> None:
        self._keeps = test
        self.running = False  # whether the model is
        self.hits: dict[str, TensorSpec | None] = {}
        self.left_out: dict[str, str] = {}
        self.expected: dict[str, bool] = {}  # and whether they were met
        self.aliases: dict[str, str] = {}
        self.kept: dict[tuple[str, tuple[object, ...]], None] = {}  # nodes, with the mechanism

    def site_lines(
        self, edges: Mapping[str, list[str]], tensors: Mapping[str, TensorSpec | None]
    ) -> list[SiteLine]:
        """What was noted down."""
        hits = dict(self.hits)
        unshaped = set[str]()
        gated: dict[str, list[str]] = {}
        for site in hits:
            gated.setdefault(site[: site.rfind("]") + 1], []).append(site)
        for node, mechanism in self.kept:
            own = gated.get(node, [])
            enters = mechanism[0] == "Nodes" and "enter" in mechanism
            if not enters:
                unshaped.update(own)  # what leaves is summed to the shape of its source afterwards
            if not own:
                # Its gates are asked for in a backward: for those outputs that get a gradient.
                outputs = edges.get(node) if enters else None
                hits |= dict.fromkeys(outputs or [f"{node}.*"])
        hits |= {site: None for site, met in self.expected.items() if met and site not in hits}
        out = dict.fromkeys(self.expected, NOT_MET) | self.left_out
        return [
            *(
                SiteLine(site, tensor or (None if site in unshaped else tensors.get(site)))
                for site, tensor in hits.items()
            ),
            *(SiteLine(site, left_out=why) for site, why in out.items() if site not in hits),
            *(
                SiteLine(site, same_as=own)
                for site, own in self.aliases.items()
                if site not in hits
            ),
        ]

    def selects(self, place: Place) -> bool | None:
        kept = self._keeps(place)
        if kept and place.whole and place.node is not None:
            node = f"{place.name}#{place.call}/{plain(place.node)}[{place.occurrence}]"
            self.kept[node, place.mechanism] = None
        return kept

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
        """It would be said when a block ends."""

    def register(self, register: RegisterHooks, stack: ExitStack) -> None:
        register(stack)

    def check_at_end(self, check: Callable[[], str]) -> None:
        """It would be asked when a block ends."""

    def hook_for(self, site: str, value: Callable[[], Tensor | None] | None = None) -> SiteHook:
        self.hits.setdefault(site)
        return _Passing(self.hits, site)

    def group_hook(
        self, sites: Sequence[str], values: Sequence[Callable[[], Tensor | None]]
    ) -> GroupFn:
        for site in sites:
            self.hits.setdefault(site)
        return lambda grads: grads


class _Passing:
    """A gate that lets pass; of what flows forward it notes the shape."""

    def __init__(self, hits: dict[str, TensorSpec | None], site: str) -> None:
        self.hits = hits
        self.site = site

    def __call__(
        self,
        grad: Tensor | None,
        value: Tensor | None = None,
        entering: tuple[Tensor | None, ...] = (),
    ) -> None:
        if grad is not None:
            self.hits[self.site] = TensorSpec.of(grad)
