"""A schedule is a list of numbers: write it down, and look at it, before you pay for the run."""

import warnings
from collections.abc import Callable
from itertools import pairwise

import torch


def planned(make: Callable, steps: int, early: bool = False) -> list[float]:
    """The rates of so many updates, as shares of the peak, without training.

    `make(optimizer)` builds the scheduler; with `early=True` it is stepped before the optimizer, by mistake.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        if early:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if not early:
            scheduler.step()
    return rates


def dry_run(make: Callable, steps: int, early: bool = False) -> str:
    """What is wrong with a decaying schedule over so many updates; an empty text where nothing is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rates = planned(make, steps, early)
    except (ValueError, UserWarning) as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    falling = rates[rates.index(max(rates)) :]
    if any(later > 1.001 * earlier for earlier, later in pairwise(falling)):
        return "it climbs again after its peak"
    if (idle := falling.count(0.0)) > 1:
        return f"{idle} updates have a rate of 0"
    return f"it ends at {falling[-1] / falling[0]:.0%} of its peak" if falling[-1] > 0.1 * falling[0] else ""
