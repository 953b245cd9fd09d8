"""The plan of a surgery: its sites, stages and the size of its state, before it is attached."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradsurg.core.intervention import Intervention
from gradsurg.core.pitfalls import visible_cells
from gradsurg.core.traced import why_it_breaks
from gradsurg.sites.model_tree import tree
from gradsurg.sites.selection import inner_model, params_by_name
from gradsurg.sites.tree_table import TensorSpec, plural
from gradsurg.torch_internals import compiling
from gradsurg.transforms.base import Stateless, init_all

if TYPE_CHECKING:
    from gradsurg.core.surgery import Surgery


def plan_of(surgery: "Surgery", model: nn.Module, example_input: Any) -> str:
    """Return the text of `Surgery.plan`."""
    outer, model = model, inner_model(model)
    params = {name: TensorSpec.of(param) for name, param in params_by_name(model).items()}
    parts = []
    for item, labels in zip(surgery.interventions, surgery.labels, strict=True):
        if item.aggregator is not None:
            # Imported here: most surgeries have no aggregator.
            from gradsurg.multitask.aggregation import plan_of as plan_of_aggregator

            planned = plan_of_aggregator(labels[0], item.aggregator, item.at, item.when, model)
            parts.append("\n".join([planned, *_contexts(item, outer)]))
            continue
        text = f"stage {item.stage}, when {item.when!r}"
        if item.at.changed_tensors != "gradients":
            text += f", changes {item.at.changed_tensors}"
        if example_input is None:
            sites = item.at.find(model)
            text += _state_size(item, {site: params.get(site) for site in sites}, params)
            text += _copies_size(item, [params[site] for site in sites if site in params])
            if "examples" in item.needs:
                # Imported here: few surgeries need the gradients of single examples.
                from gradsurg.per_example.gradients import plan_of as plan_of_examples

                text += plan_of_examples(item.links[0], model, sites)
            below = [f"  {line}" for line in (text, *sites)]
        else:
            modules = tree(model, example_input, item.at)
            hits = {line.site: line.tensor for line in modules.site_lines if line.selected}
            text += f", {plural(len(hits), 'site')}{_state_size(item, hits, params)}"
            text += _copies_size(item, [params[site] for site in hits if site in params])
            below = [str(modules), text]
        below += _contexts(item, outer)
        links = " -> ".join(f"{x}: {y!r}" for x, y in zip(labels, item.links, strict=True))
        parts.append("\n".join([f"{links} at {item.at!r}", *below]))
    if example_input is None:
        return "\n".join(parts) or "no intervention"
    return "\n\n".join(parts) or f"{tree(model, example_input)}\nno intervention"


def _contexts(item: Intervention, model: nn.Module) -> list[str]:
    """Return a line for each cell of the table of contexts that applies, and one on compiling."""
    cells = visible_cells(item.at, model, "" if item.aggregator else item.stage)
    lines = [
        f"  {cell.kinds.replace('.', ' ')} {cell.outcome} ({cell.context}): {cell.text}"
        for cell in dict.fromkeys(cells)
    ]
    if item.aggregator is None and any(map(compiling.is_compiled, model.modules())):
        kinds = [leaf.kind_at(item.stage) for leaf in item.at.leaves]
        if any(kind.known_at == "forward" for kind in kinds):
            why = why_it_breaks(item)
            text = f"each module is a graph break: {why}" if why else "one graph if effects_every=0"
            lines.append(f"  compiled: {text}")
    return lines


def _state_size(
    item: Intervention,
    sites: Mapping[str, TensorSpec | None],
    params: Mapping[str, TensorSpec | None],
) -> str:
    """The size of an intervention's state at its sites, as far as their shapes are known."""
    if all(isinstance(link, Stateless) for link in item.links):
        return ""
    likes = [like for like in sites.values() if like is not None]
    grads = [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in likes]
    state = init_all(item.operator, grads) if grads else {}  # of "meta" tensors: no memory is used
    size = sum(tensor.nbytes for tensor in state.values())
    text = f", {plural(size, 'byte')} of state" if size else ""
    if size and any(like is not None and site not in params for site, like in sites.items()):
        text += " with this input"
    unknown = len(sites) - len(likes)
    return text + (f", state of unknown size at {plural(unknown, 'site')}" if unknown else "")


def _copies_size(item: Intervention, params: Sequence[TensorSpec | None]) -> str:
    """The size of the copies of parameters that a selector holds during a step; empty if none."""
    if not any(leaf.copies_params for leaf in item.at.leaves):
        return ""
    likes = [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in params if like]
    size = sum(tensor.nbytes for tensor in likes)
    return f", {plural(size, 'byte')} of copied parameters in each step"
