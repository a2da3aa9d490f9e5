"""Draw mixed-precision-steps.png: the four moves of a mixed-precision step. Run it with the course's environment."""

from pathlib import Path

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from speedlab import plots

FP32, HALF = plots.COLOURS[4], plots.COLOURS[1]
WIDTH, HEIGHT = 3.1, 1.25
# (left, bottom): title, text, colour, hatch
BOXES = {
    (0.0, 2.6): ("master copy", "fp32, 4 bytes a weight", FP32, ""),
    (6.4, 2.6): ("weights", "16 bits, 2 bytes each", HALF, "//"),
    (6.4, 0.0): ("gradients", "16 bits, 2 bytes each", HALF, "//"),
    (0.0, 0.0): ("gradients", "fp32, 4 bytes each", FP32, ""),
}
TOP, BOTTOM = 2.6 + HEIGHT / 2, HEIGHT / 2
GAP = 0.12
# (from, to), (where the text stands), text
ARROWS = [
    ((WIDTH + GAP, TOP), (6.4 - GAP, TOP), (4.75, TOP + 0.2), "1  cast"),
    ((6.4 + WIDTH / 2, 2.6 - GAP), (6.4 + WIDTH / 2, HEIGHT + GAP), (6.4 + WIDTH / 2 + 0.15, 1.92),
     "2  forward\n    and backward"),
    ((6.4 - GAP, BOTTOM), (WIDTH + GAP, BOTTOM), (4.75, BOTTOM + 0.2), "3  cast back"),
    ((WIDTH / 2, HEIGHT + GAP), (WIDTH / 2, 2.6 - GAP), (WIDTH / 2 + 0.15, 1.92), "4  update"),
]  # fmt: skip


def main() -> None:
    shown, ax = plots.figure(10.0, 3.7)
    for (left, bottom), (title, text, colour, hatch) in BOXES.items():
        ax.add_patch(
            FancyBboxPatch((left, bottom), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.15", facecolor=colour,
                           alpha=0.35, hatch=hatch, edgecolor="white")
        )  # fmt: skip
        ax.add_patch(
            FancyBboxPatch((left, bottom), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.15", fill=False,
                           edgecolor="black", linewidth=1.4)
        )  # fmt: skip
        centre = left + WIDTH / 2
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9}
        ax.text(centre, bottom + 0.82, title, ha="center", va="center", fontsize=13, fontweight="bold", bbox=plate)
        ax.text(centre, bottom + 0.4, text, ha="center", va="center", fontsize=11.5, bbox=plate)
    for start, end, (x, y), text in ARROWS:
        ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=22, linewidth=2, color="black"))
        sideways = start[1] == end[1]
        ax.text(x, y, text, ha="center" if sideways else "left", va="bottom" if sideways else "center", fontsize=13)
    ax.set_xlim(-0.1, 11.6)
    ax.set_ylim(-0.1, 3.95)
    ax.set_aspect("equal")
    ax.axis("off")
    Path(__file__).with_name("mixed-precision-steps.png").write_bytes(plots.png(shown))


if __name__ == "__main__":
    main()
