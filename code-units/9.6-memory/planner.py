"""How much memory it takes to train a vision transformer, by arithmetic. Notebook 1 checks it against rehearsals."""

from collections.abc import Callable

# bytes per number in weights, in the residual stream's gradients, and in the other activation gradients
_BYTES = {"fp32": (4, 4, 4), "bf16-mixed": (4, 4, 2), "bf16-true": (2, 2, 2)}


def budget(
    block_bytes: Callable[..., int],
    batch: int,
    precision: str,
    optimizer: str,
    checkpointing: bool,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    tokens: int = 197,
) -> dict[str, dict[str, int]]:
    """Bytes by kind at the three moments that can be the peak, for 224 × 224 images, 16 × 16 patches and 10 classes.

    `block_bytes(batch, tokens, width, heads, precision)` is what one block keeps; `optimizer` is 'AdamW' or 'SGD'.
    """
    size, residual, inner = _BYTES[precision]
    patches, head = (3 * 16**2 + 1) * width, 10 * (width + 1)
    weights = layers * (12 * width**2 + 13 * width) + patches + (tokens + 1) * width + 2 * width + head
    border, block = batch * tokens * width * size, block_bytes(batch, tokens, width, heads, precision)
    kept = (layers - 1) * border + block if checkpointing else layers * block + 2 * border
    images = batch * 3 * 224**2 * (size + 2 * (precision == "bf16-mixed"))  # autocast makes a copy
    gradients_of_mlp = batch * tokens * width * (residual + 4 * inner)  # its input and its hidden layer of 4 widths
    moments = 2 * weights * size if optimizer == "AdamW" else 0

    def moment(gradients: int, activations: int, temporaries: int) -> dict[str, int]:
        return {
            "parameters": weights * size,
            "optimizer state": moments,
            "gradients": gradients,
            "activations": activations + images,
            "temporaries": temporaries,
        }

    return {
        "forward turns\ninto backward": moment(0, kept, gradients_of_mlp),
        "end of\nbackward": moment(weights * size, block, gradients_of_mlp),
        "optimizer's\nstep": moment(weights * size, 0, moments // 2),  # foreach temporaries, as large as the weights
    }


def peak(moments: dict[str, dict[str, int]]) -> int:
    """The peak in bytes: the largest total of any moment."""
    return max(sum(kinds.values()) for kinds in moments.values())
