"""What fp16 training stores in 16 bits during backward: the gradients at the outputs of matrix products."""

import re

import torch

_PRODUCT = re.compile(r"(Addmm|Mm|Baddbmm|Bmm|Linear|Convolution|ScaledDotProduct)")


def product_gradients(loss: torch.Tensor) -> list[torch.Tensor]:
    """Run backward, and return the gradients at the outputs of matrix products, convolutions and attention.

    The products are found in autograd's graph, whichever module or function ran them: `nn.MultiheadAttention`
    never calls its projections as modules, so hooks on them would see nothing.
    """
    found: list[torch.Tensor] = []
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _PRODUCT.match(node.name()):
            node.register_prehook(lambda grads: found.append(grads[0]))
        todo += [before for before, _ in node.next_functions]
    loss.backward()
    return found
