"""Is what an optimizer is said to make in its first step what it makes?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from punar.torch.optimizer_state import bytes_to_come

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adam": torch.optim.Adam,
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_told_before_the_first_step(name: str) -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5), nn.Linear(5, 5))
    model[2].requires_grad_(False)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(torch.ones(3, 10)).sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    coming = bytes_to_come(optimizer)
    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert coming == sum(
        tensor.nbytes for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, torch.Tensor)
    )
    assert bytes_to_come(optimizer) == 0


def test_what_cannot_be_told_is_none() -> None:
    class Own(torch.optim.SGD):
        pass

    model = nn.Linear(4, 4)
    model(torch.ones(3, 4)).sum().backward()
    assert bytes_to_come(Own(model.parameters())) is None
    assert bytes_to_come(torch.optim.LBFGS(model.parameters())) is None  # its step asks for the loss
