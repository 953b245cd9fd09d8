"""Each hook of PyTorch's C++ API, built from native_hooks.cpp on the first call (about 10 s).

C++ hooks run where Python's do, and Python sees none of them: `tensor._backward_hooks` is empty and
`deepcopy` drops them. On a leaf the two kinds discard each other without a word.
"""

import shutil
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils import cpp_extension

import gradsurg as gs

if not (shutil.which(cpp_extension.get_cxx_compiler()) and cpp_extension.is_ninja_available()):
    print(f"skipped: needs the compiler {cpp_extension.get_cxx_compiler()} and ninja")
    sys.exit()
SOURCE = Path(__file__).with_suffix(".cpp")
cpp = cpp_extension.load("gradsurg_native_hooks", [str(SOURCE)], extra_cflags=["-O0"])


def run(title: str, output: torch.Tensor, leaf: torch.Tensor) -> None:
    leaf.grad = None
    output.sum().backward(retain_graph=True)
    print(f"{title}: .grad {leaf.grad.tolist()}", *cpp.take_lines(), sep="\n    ")


leaf = torch.ones(1, requires_grad=True)
middle = leaf * 5
output = middle * 1

key = cpp.add_tensor_hook(middle)  # times 3
run("Tensor::register_hook", output, leaf)
cpp.remove_tensor_hook(middle, key)
run("removed", output, leaf)

cpp.add_pre_hook(middle)  # times 2
run("Node::add_pre_hook", output, leaf)
cpp.remove_pre_hook(middle)
run("erased from node->pre_hooks()", output, leaf)

key = cpp.add_post_hook(middle)
run("Node::add_post_hook", output, leaf)
cpp.remove_post_hook(middle, key)
run("Node::del_post_hook", output, leaf)

cpp.set_post_accumulate_hook(leaf, True)
run("set_post_acc_grad_hooks", output, leaf)
cpp.set_post_accumulate_hook(leaf, False)
run("set to null", output, leaf)

key = cpp.add_queueing_hook(middle)
run("Engine::queue_callback, from a hook", output, leaf)
cpp.remove_tensor_hook(middle, key)

key = cpp.add_capturing_hook(output, middle)
(grad,) = torch.autograd.grad(output.sum(), middle, retain_graph=True)
print(f"autograd.grad with a capture hook: {grad.tolist()}", *cpp.take_lines(), sep="\n    ")
cpp.remove_tensor_hook(output, key)
(grad,) = torch.autograd.grad(output.sum(), middle, retain_graph=True)
print(f"it belonged to that backward pass alone: {grad.tolist()}")

print("\nThe trap: on a leaf, C++ and Python hooks discard each other.")
for first in ("Python", "C++"):
    leaf = torch.ones(1, requires_grad=True)
    for kind in (first, *{"Python", "C++"} - {first}):
        if kind == "Python":
            leaf.register_hook(lambda grad: grad * 7)
        else:
            cpp.add_tensor_hook(leaf)
    run(f"{first} first, then the other", leaf * 1, leaf)

model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
half = gs.Surgery(gs.Intervention(gs.Scale(0.5), at=gs.Parameters("weight")))
with warnings.catch_warnings(record=True) as caught, half.attach(model, optimizer):
    warnings.simplefilter("always")
    for step in range(3):
        if step == 1:
            cpp.add_tensor_hook(model.weight)
        model(torch.ones(1)).backward()
        optimizer.step()
        print(f"gradsurg, step {step}:", *([item.message for item in caught] or ["no warning"]))
        caught.clear()
