"""What a cell shows beside prose: lines and tables, measured or exact.

A figure that a clock, an allocator or a random machine made is shown by `measured` or by a `Table` with
`measured=True`. The test compares the labels of such displays and blanks their values; everything else that a
cell prints is compared as it stands.
"""

from dataclasses import dataclass
from html import escape

MARK = "[measured]"


def measured(label: str, value: object) -> None:
    """Print one measured value: `[measured] label: value`. The label holds no colon; it is what the test compares."""
    print(f"{MARK} {_label(label)}: {_one_line(value)}")


@dataclass(frozen=True)
class Table:
    """A small table: HTML in a notebook, plain lines elsewhere.

    `columns` name the columns; the first one is the row's label. With `measured=True` the test compares the
    caption, the columns and the rows' labels, and leaves the other cells alone.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    caption: str = ""
    measured: bool = False

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ValueError(
                f"A table row has {len(wrong[0])} cells, but there are {len(self.columns)} columns: "
                f"{wrong[0]!r}. Give every row one cell a column."
            )

    def __repr__(self) -> str:
        if self.measured:
            lines = [f"{MARK} {_label(row[0])}: " + " | ".join(map(_one_line, row[1:])) for row in self.rows]
            head = [f"{self.caption} ({' | '.join(self.columns[1:])})".strip()]
            return "\n".join(head + lines)
        cells = [[_one_line(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join(([self.caption] if self.caption else []) + lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th scope='col'>{escape(c)}</th>" for c in self.columns)
        body = "".join(
            f"<tr><th scope='row'>{escape(_one_line(row[0]))}</th>"
            + "".join(f"<td>{escape(_one_line(cell))}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        kind = "measured" if self.measured else "exact"
        note = " <em>(measured on this machine)</em>" if self.measured else ""
        caption = f"<caption>{escape(self.caption)}{note}</caption>" if self.caption else ""
        return f'<table class="{kind}">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def table(columns: list[str], rows: list[tuple], caption: str = "", measured: bool = False) -> Table:
    """A `Table` from plain lists."""
    return Table(tuple(columns), tuple(tuple(row) for row in rows), caption, measured)


def bytes_text(count: float) -> str:
    """Bytes as people read them, in powers of 1024: `384 KiB`, `1.50 GiB`."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(count) >= size:
            amount = count / size
            return f"{amount:.0f} {unit}" if amount >= 100 or amount == int(amount) else f"{amount:.2f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Seconds as people read them, with three digits: `1.47 s`, `22.5 ms`, `830 µs`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def _label(value: object) -> str:
    text = _one_line(value)
    if ":" in text:
        raise ValueError(f"The label {text!r} of a measured value holds a colon, which ends the label. Reword it.")
    return text
