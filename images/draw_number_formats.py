"""Draw number-formats.png: the bits of six number formats, to scale. Run it with the course's environment."""

from pathlib import Path

from matplotlib.patches import Rectangle

from speedlab import plots

# name: (exponent bits, fraction bits, bits that are stored and rounded away)
FORMATS = {
    "fp32": (8, 23, 0),
    "tf32": (8, 10, 13),
    "fp16": (5, 10, 0),
    "bf16": (8, 7, 0),
    "fp8 e4m3": (4, 3, 0),
    "fp8 e5m2": (5, 2, 0),
}
SIGN, EXPONENT, FRACTION = plots.COLOURS[6], plots.COLOURS[1], plots.COLOURS[4]
HEIGHT = 0.62


def field(ax, row: int, start: int, bits: int, colour: str, hatch: str, text: str) -> int:
    """One field: a box for each bit, and how many there are; returns where the next field starts."""
    for bit in range(start, start + bits):
        ax.add_patch(
            Rectangle((bit, row), 1, HEIGHT, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=1.2)
        )
    ax.add_patch(Rectangle((start, row), bits, HEIGHT, fill=False, edgecolor="black", linewidth=1.4))
    ax.text(
        start + bits / 2, row + HEIGHT / 2, text, ha="center", va="center", fontsize=11, fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9},
    )  # fmt: skip
    return start + bits


def main() -> None:
    shown, ax = plots.figure(10.5, 3.9)
    for row, (exponent, fraction, unread) in enumerate(FORMATS.values()):
        end = field(ax, row, 0, 1, SIGN, "", "1")
        end = field(ax, row, end, exponent, EXPONENT, "//", str(exponent))
        end = field(ax, row, end, fraction, FRACTION, "..", str(fraction))
        if unread:
            ax.add_patch(Rectangle((end, row), unread, HEIGHT, fill=False, edgecolor="black", linestyle=":"))
            ax.text(end + unread / 2, row + HEIGHT / 2, f"{unread} stored, rounded away", ha="center", va="center")
    ax.set_yticks([row + HEIGHT / 2 for row in range(len(FORMATS))], list(FORMATS))
    ax.tick_params(axis="y", length=0)
    ax.set_xticks([8, 16, 24, 32])
    ax.set_xlim(-0.2, 32.2)
    ax.set_ylim(len(FORMATS) - 0.2, -0.25)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("bits")
    ax.legend(
        handles=[
            Rectangle((0, 0), 1, 1, facecolor=SIGN, edgecolor="white", label="sign"),
            Rectangle((0, 0), 1, 1, facecolor=EXPONENT, hatch="//", edgecolor="white", label="exponent: the range"),
            Rectangle(
                (0, 0), 1, 1, facecolor=FRACTION, hatch="..", edgecolor="white", label="fraction: the precision"
            ),
        ],
        loc="lower right",
        fontsize=11,
    )
    Path(__file__).with_name("number-formats.png").write_bytes(plots.png(shown))


if __name__ == "__main__":
    main()
