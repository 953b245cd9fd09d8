"""The help text of the command line, and the descriptions of the short keys that it prints.

Hydra fills the template with the config; it imports no torch.
"""

import ast
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill

SCHEMA = Path(__file__).with_name("settings.py")
INDENT, WIDTH = 23, 79
HEAD = """\
Train a small model with a gradient transform and, with the same seeds,
without it; compare the two.

  python -m gradsurg.run transform=clip
  python -m gradsurg.run 'transform=[clip,noise]' transform.clip.value=0.02
  python -m gradsurg.run transform=scale_by_sign site=relu_nodes
  python -m gradsurg.run transform=clip_global_norm when.start=100 seeds=3
  python -m gradsurg.run aggregator=pcgrad task=overlay model=multi_head
  python -m gradsurg.run -m transform=clip,sign model=mlp,convnet study=first

Groups. Choose one option with group=option. transform and logger take
lists: 'transform=[clip,noise]'. A table of the options of a group, with
their purpose, fields and paper: --list transform (or site, ..). Options by
meaning: --list sparse, --list weight decay.

  transform   the change to a gradient; several act in this order
  site        where it acts: parameters, outputs or inputs of modules,
              autograd nodes, activations ..
  when        the condition under which it acts: steps, epochs, batch
              size, values .. (or the aggregator, without a transform)
  aggregator  how the gradients of several tasks become one: pcgrad,
              cagrad, mgda, upgrad ..
  model       the network
  task        the data, the loss and the metrics
  optimizer   one of torch.optim
  schedule    the learning rate over the optimizer steps
  logger      where numbers go in addition to the files of the run

{groups}

Your own transform, aggregator, model, task or trigger: give its dotted
path, transform=my_module.MyTransform, or put yaml files into a folder and
add --config-dir.

Keys. Change one with key=value:

"""
TAIL = """

Groups and keys as they are now:

$CONFIG
"""


def template(groups: Sequence[str]) -> str:
    """Return the template of Hydra's help, with a line for the options of each group."""
    shared = {f"shared.{key}": text for key, text in described("Shared").items()}
    keys = described("Settings") | shared
    lines = [folded(f"  {key:<{INDENT - 2}}", text, " " * INDENT) for key, text in keys.items()]
    return HEAD.format(groups="\n".join(groups)) + "\n".join(lines) + TAIL


def described(name: str) -> dict[str, str]:
    """Return the text below each field of a class of the schema, on one line.

    The schema is read without importing it, because it imports a library that help does not need.
    """
    module = ast.parse(SCHEMA.read_text(encoding="utf-8"))
    classes = {one.name: one for one in module.body if isinstance(one, ast.ClassDef)}
    texts = {}
    for field, below in pairwise(classes[name].body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
    return texts


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
