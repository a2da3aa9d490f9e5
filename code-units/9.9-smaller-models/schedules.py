"""A schedule is a list of numbers: write it down and look at it before you pay for the run."""

import warnings
from collections.abc import Callable
from itertools import pairwise

import torch


def in_order(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """One update in the right order: the optimizer first, then the scheduler."""
    optimizer.step()
    scheduler.step()


def planned(make: Callable, steps: int, loop: Callable = in_order) -> list[float]:
    """The rates that `steps` updates use, as shares of the peak, found without training.

    `make(optimizer)` builds the scheduler; `loop(optimizer, scheduler)` does one update, in your own loop's order.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler, rates = make(optimizer), []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for _ in range(steps):
        loop(optimizer, scheduler)
    return rates


def dry_run(make: Callable, steps: int, loop: Callable = in_order) -> str:
    """What is wrong with a decaying schedule over `steps` updates; an empty string if nothing is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rates = planned(make, steps, loop)
    except (ValueError, UserWarning) as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    falling = rates[rates.index(max(rates)) :]
    if any(later > 1.001 * earlier for earlier, later in pairwise(falling)):
        return "it climbs again after its peak"
    if (idle := falling.count(0.0)) > 1:
        return f"{idle} updates have a rate of 0"
    # a decay to a tenth, as for language models, comes near it from above
    return f"it ends at {falling[-1] / falling[0]:.0%} of its peak" if falling[-1] > 0.11 * falling[0] else ""
