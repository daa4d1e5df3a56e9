"""Names of an optimizer's parameters, which ranks compare: they must be the same wherever code is."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from zenps.worker.training.gradients.agreement import ParameterNames


def make(*shapes: int) -> list[Parameter]:
    return [Parameter(torch.ones(size)) for size in shapes]


def test_without_names_they_are_positions_in_all_groups_frozen_ones_included() -> None:
    """Those of the others stay what they are once a parameter is unfrozen."""
    first, frozen, last, added = make(1, 2, 3, 4)
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": [first, frozen]}, {"params": [last]}], lr=0.1)
    names = ParameterNames(optimizer, None)
    trained = {"parameter0": first, "parameter2": last}
    assert names.trained() == trained
    assert not names.has_others({first, last})
    frozen.requires_grad_()
    assert names.has_others({first, last})
    optimizer.add_param_group({"params": [added]})
    assert names.trained() == {**trained, "parameter1": frozen, "parameter3": added}


def test_names_that_torch_was_given_are_taken() -> None:
    first, second, added = make(1, 2, 3)
    optimizer = torch.optim.SGD([("one", first), ("two", second)], lr=0.1)
    names = ParameterNames(optimizer, None)
    optimizer.add_param_group({"params": [("three", added)]})
    assert names.trained() == {"one": first, "two": second, "three": added}


def test_named_parameters_come_before_names_of_torch_and_in_their_order() -> None:
    """Ranks may have the groups in another order. What nobody has named comes last."""
    first, second, unused, added = make(1, 2, 3, 4)
    optimizer = torch.optim.SGD([("one", first), ("two", second)], lr=0.1)
    names = ParameterNames(optimizer, [("unused", unused), ("b", second), ("a", first)])
    assert list(names.trained().items()) == [("b", second), ("a", first)]
    optimizer.param_groups[0]["params"].insert(0, added)
    optimizer.param_groups[0]["param_names"].insert(0, "added")
    assert list(names.trained()) == ["b", "a", "added"]
