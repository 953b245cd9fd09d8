"""The help text of the command line, and the descriptions of the short keys that it prints.

It imports no torch.
"""

import ast
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill

SCHEMA = Path(__file__).with_name("settings.py")
INDENT, WIDTH = 23, 79
MOST_LINES = 3  # of the names of a group
HEAD = """\
Train a small model with a gradient transform and, with the same seeds,
without it; compare the two.

  python -m gradsurg.run transform=clip
  python -m gradsurg.run 'transform=[clip,noise]' transform.clip.value=0.02
  python -m gradsurg.run transform=scale_by_sign site=relu_nodes
  python -m gradsurg.run transform=clip_global_norm when.start=100 seeds=3
  python -m gradsurg.run aggregator=pcgrad task=overlay model=multi_head
  python -m gradsurg.run -m transform=clip,sign model=mlp,convnet study=first

Flags:

  -m                train each combination of the values listed with commas
  --list [GROUP]    print the options of a group with their purpose, fields
                    and paper, or search them: --list sparse, --list weight
                    decay; --json prints all of it as JSON
  --config-dir DIR  add the yaml files in DIR/transform, DIR/model and so on
  --cfg job         print the whole config with your changes, and stop

Groups. Choose one option with group=option, such as site=outputs; defaults
are in brackets. transform and logger take lists: 'transform=[clip,noise]'.

  transform   the change to a gradient; several act in this order [{transform}].
              With neither a transform nor an aggregator the plain
              model is trained, and compared with nothing
  site        where it acts: parameters, outputs or inputs of modules,
              autograd nodes, activations .. [{site}]
  when        the condition under which it acts: steps, epochs, batch
              size, values .. With an aggregator and no transform, the
              condition under which the aggregator acts [{when}]
  aggregator  how the gradients of several tasks become one: pcgrad,
              cagrad, mgda, upgrad .. [{aggregator}]
  model       the network [{model}]
  task        the data, the loss and the metrics [{task}]
  optimizer   one of torch.optim [{optimizer}]
  schedule    the learning rate over the optimizer steps [{schedule}]
  logger      where numbers go, besides the study's files [{logger}]
  experiment  settings of several groups: a paper's method or a study

{groups}

Your own transform, aggregator, model, task or trigger: give its dotted
path, transform=my_module.MyTransform, or put yaml files into a folder and
add --config-dir.

Keys. Change one with key=value. The default is in brackets; null is no
value.

"""


def template(options: Mapping[str, Sequence[str]], chosen: Mapping[str, object]) -> str:
    """Return the template of Hydra's help, for the options of each group and the default ones."""
    groups = "\n".join(_names(group, names) for group, names in options.items())
    texts = described("Settings") | _below("shared", described("Shared"))
    defaults = _defaults("Settings") | _below("shared", _defaults("Shared"))
    lines = [
        folded(f"  {key:<{INDENT - 2}}", f"{text}{defaults.get(key, '')}", " " * INDENT)
        for key, text in texts.items()
    ]
    each = {key: ",".join(one) if isinstance(one, list) else one for key, one in chosen.items()}
    return HEAD.format(groups=groups, **each) + "\n".join(lines) + "\n"


def _names(group: str, names: Sequence[str]) -> str:
    """Return the options of a group in a few lines."""
    whole = folded(f"{group}: ", ", ".join(names), "  ")
    if whole.count("\n") < MOST_LINES:
        return whole
    end = f", ... and {{}} more: --list {group}"
    shown = [*names]
    while folded(f"{group}: ", ", ".join(shown) + end, "  ").count("\n") >= MOST_LINES:
        shown.pop()
    text = ", ".join(shown) + end.format(len(names) - len(shown))
    return folded(f"{group}: ", text, "  ")


def _below(group: str, texts: Mapping[str, str]) -> dict[str, str]:
    return {f"{group}.{key}": text for key, text in texts.items()}


def described(name: str) -> dict[str, str]:
    """Return the text below each field of a class of the schema, on one line."""
    texts = {}
    for field, below in pairwise(_body(name)):
        match field, below:
            case ast.AnnAssign(target=ast.Name(key)), ast.Expr(ast.Constant(str(text))):
                texts[key] = " ".join(text.split())
    return texts


def _defaults(name: str) -> dict[str, str]:
    """Return the default of each field of a class of the schema as ` [0.1]`, if it is a literal."""
    texts = {}
    for field in _body(name):
        match field:
            case ast.AnnAssign(target=ast.Name(key), value=ast.Constant(value)):
                shown = value if isinstance(value, str) and value else json.dumps(value)
                texts[key] = f" [{shown}]"
    return texts


def _body(name: str) -> list[ast.stmt]:
    """Return the statements of a class of the schema, whose import would import pydantic."""
    module = ast.parse(SCHEMA.read_text(encoding="utf-8"))
    classes = {one.name: one for one in module.body if isinstance(one, ast.ClassDef)}
    return classes[name].body


def folded(begin: str, text: str, later: str, width: int = WIDTH) -> str:
    """Fold a text behind `begin`, with `later` before its other lines."""
    return fill(
        text,
        width,
        initial_indent=begin,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
