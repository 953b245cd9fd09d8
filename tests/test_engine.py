"""What gradsurg relies on in PyTorch without it being exported."""

import torch

from gradsurg import engine


def test_sequence_numbers_go_up_by_one_with_each_differentiable_node() -> None:
    leaf = torch.ones(2, requires_grad=True)
    before = engine.next_sequence_number()
    node = (leaf * 2).grad_fn
    assert node is not None
    assert node._sequence_nr() == before
    assert engine.next_sequence_number() == before + 1


def test_in_backward_is_true_inside_a_hook_alone() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: seen.append(engine.in_backward()))
    leaf.sum().backward()
    assert seen == [True]
    assert not engine.in_backward()


def test_a_callback_comes_after_the_gradients_are_there() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)

    def hook(grad: torch.Tensor) -> None:
        engine.at_end_of_backward(lambda: seen.append(leaf.grad is not None))

    leaf.register_hook(hook)
    leaf.sum().backward()
    assert seen == [True]


def test_in_functorch_is_true_under_vmap_alone() -> None:
    seen = []

    def look(row: torch.Tensor) -> torch.Tensor:
        seen.append(engine.in_functorch())
        return row

    torch.vmap(look)(torch.ones(2, 3))
    assert seen == [True]
    assert not engine.in_functorch()


def test_foreach_operations_do_what_their_names_say() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[2.0]])]
    assert [norm.item() for norm in engine.foreach_norm(tensors, 2.0)] == [5.0, 2.0]
    halves = engine.foreach_mul(tensors, torch.tensor(0.5))
    assert [half.tolist() for half in halves] == [[1.5, 2.0], [[1.0]]]


def test_each_backward_pass_has_a_number_of_its_own() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: seen.append(engine.backward_task()))
    for _ in range(2):
        leaf.sum().backward()
    assert len(set(seen)) == 2
    assert engine.backward_task() == -1


def test_flat_puts_entries_one_after_the_other() -> None:
    assert engine.flat([torch.ones(2, 2), torch.tensor(3.0)]).tolist() == [1, 1, 1, 1, 3]
