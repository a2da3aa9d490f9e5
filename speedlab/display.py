"""What a cell shows besides prose: lines and tables, measured or exact, and words that others wrote.

A figure that a clock, an allocator or a random machine made is shown by `measured` or by a `Table` with
`measured=True`: the test compares its labels and leaves its values alone. So it must really be a value: a number with
its unit and spread, or a verdict of a fixed vocabulary. A conclusion in free words would always pass, and is refused.
Everything else that a cell prints is compared as it stands.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

MARK = "[measured]"
# Besides their text, claims and these displays carry a MIME type of their own, which no print can imitate.
CLAIM = "application/vnd.speedlab.claim+json"
MEASURED = "application/vnd.speedlab.measured+json"
QUOTED = "application/vnd.speedlab.quoted+json"

_UNITS = (
    "% x × s ms µs ns min h B KiB MiB GiB TiB kB KB MB GB TB B/s MB/s GB/s GiB/s FLOP FLOPs MFLOP GFLOP TFLOP "
    "FLOP/s MFLOP/s GFLOP/s TFLOP/s FLOP/B Hz W J kWh /s"
).split()
_WORDS = frozenset(
    "a about after again ago already an and at backward baseline batch batches but by call calls compilation "
    "compilations core cores cpu day days decimals does element elements ended epoch epochs errors faster first "
    "for forward from gpu gpus graph graphs guess half here high hits hour hours image images in inf it iteration "
    "iterations kept kernel kernels label labels larger last least less limit longer low lower mean median memory "
    "message messages micro-batch middle minute minutes misses more most nan negative neither never no noisy none "
    "not nothing of off on once one operation operations or out over overflow own pairs parameters per pixel "
    "pixels point points positive predicted prediction process processes ran range rank ranks repeat repeats "
    "returned review reviews right round rounds row rows run runs same sample samples second seconds shorter "
    "shown slower smaller spread start started step steps takes tell test text texts than that the them there "
    "these thread threads three time times to token tokens too took train trial trials tried two unit units until "
    "update updates wait waiting was whole within word words worker workers wrong yes yet you your".split()
)
_NUMBER = r"[-+±~≈<>≤≥]?(?:\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan)"
_AMOUNT = re.compile(rf"{_NUMBER}(?:{'|'.join(map(re.escape, sorted(_UNITS, key=len, reverse=True)))})?")
_NOT_RUN = "not run here: "
_CONCLUSION = re.compile(r"faster|slower|quicker|better|worse|\bwins?\b|\bloses?\b|\d\s*[x×]\B|\d times", re.I)


def measured(label: str, value: object, *, guess: object = None) -> None:
    """Show one measured value: `[measured] label: value`. The test compares the label, which must hold no colon.

    `value` is a number, a timing, a ratio, or words of the fixed vocabulary (see `unmeasured_word`); `guess` is what
    the reader predicted, shown beside it.
    """
    shown = _measured_text(label, value)
    if guess is not None:
        shown += f" (your guess: {_one_line(guess)})"
    emit(f"{MARK} {_label(label)}: {shown}", MEASURED, {"labels": [_label(label)]})


def quoted(label: str, text: object, *, always: str) -> None:
    """Show words of a library, a compiler or a data set that differ from machine to machine, as they stand.

    `always` is the part that they contain on every machine: it is checked here, and it is what the test compares.
    """
    words = _one_line(text)
    if not always or always not in words:
        raise ValueError(f"The words quoted for {label!r} should hold {always!r}, but they are: {words!r}.")
    emit(f"[quoted] {_label(label)}: {words}", QUOTED, {"label": _label(label), "always": always})


def unmeasured_word(text: str) -> str | None:
    """The first word of `text` that is neither a number with a unit nor in the fixed vocabulary, or None.

    `not run here: …` may give any reason that draws no conclusion. An empty text is a cell with nothing in it.
    """
    if text.startswith(_NOT_RUN):
        found = _CONCLUSION.search(text)
        return found[0] if found else None
    for word in re.sub(r"[(){}\[\];:|]|,(?!\d)|\.(?!\d)", " ", text).split():
        parts = [part for part in re.split(r"(?<=[\w%])(?<!\de)[-–/=](?=\d)|→", word) if part]
        known = word in _UNITS or word.lower().removesuffix("/s") in _WORDS or word in tuple("-–+=·…/")
        if not known and not all(_AMOUNT.fullmatch(part) for part in parts):
            return word
    return None


def emit(text: str, kind: str, content: dict) -> None:
    """Display a line with its own MIME type beside the text; where there is no notebook, print it."""
    from IPython import display, get_ipython

    if get_ipython() is None:
        print(text)
    else:
        display.display({"text/plain": text, kind: content}, raw=True)


class Tabular:
    """Something that a notebook shows as a table, the one that its method `table()` returns."""

    table: Callable[[], "Table"]

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, object]:
        return self.table()._repr_mimebundle_()


@dataclass(frozen=True, repr=False)
class Table:
    """A small table: HTML in a notebook, plain lines elsewhere.

    `columns` name the columns; the first one is the row's label. With `measured=True` the test compares the
    caption, the columns and the rows' labels, and leaves the other cells alone; they hold what `measured` may show.
    `stamp=True` does the same for a description of a machine, whose names and versions may be anything.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    caption: str = ""
    measured: bool = False
    stamp: bool = False

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ValueError(
                f"A table row has {len(wrong[0])} cells, but there are {len(self.columns)} columns: "
                f"{wrong[0]!r}. Give every row one cell per column."
            )
        if self.measured:
            for row in self.rows:
                for cell in row[1:]:
                    _measured_text(row[0], cell)

    def __repr__(self) -> str:
        if self.measured or self.stamp:
            lines = [f"{MARK} {_label(row[0])}: " + " | ".join(map(_one_line, row[1:])) for row in self.rows]
            head = [f"{self.caption} ({' | '.join(self.columns[1:])})".strip()]
            return "\n".join(head + lines)
        cells = [[_one_line(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join(([self.caption] if self.caption else []) + lines)

    def _repr_html_(self) -> str:
        """The table as HTML, for a notebook or a widget's view."""
        head = "".join(f"<th scope='col'>{escape(c)}</th>" for c in self.columns)
        body = "".join(
            f"<tr><th scope='row'>{escape(_one_line(row[0]))}</th>"
            + "".join(f"<td>{escape(_one_line(cell))}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        clocked = self.measured or self.stamp
        note = " <em>(measured on this machine)</em>" if clocked else ""
        caption = f"<caption>{escape(self.caption)}{note}</caption>" if self.caption else ""
        kind = "measured" if clocked else "exact"
        return f'<table class="{kind}">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, object]:
        bundle: dict[str, object] = {"text/plain": repr(self), "text/html": self._repr_html_()}
        if self.measured or self.stamp:
            labels = [_label(row[0]) for row in self.rows]
            bundle[MEASURED] = {"labels": labels, **({"stamp": True} if self.stamp else {})}
        return bundle


def table(columns: list[str], rows: list[tuple], caption: str = "", measured: bool = False) -> Table:
    """A `Table` from plain lists; a measured True or False is written as yes or no."""
    cells = (tuple(map(_yes_or_no, row)) if measured else tuple(row) for row in rows)
    return Table(tuple(columns), tuple(cells), caption, measured)


def bytes_text(count: float) -> str:
    """Bytes as people read them, in powers of 1024: `384 KiB`, `1.50 GiB`."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(count) >= size:
            amount = count / size
            return f"{amount:.0f} {unit}" if amount >= 100 or amount == int(amount) else f"{amount:.2f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Seconds as people read them, with three digits: `1.47 s`, `22.5 ms`, `830 µs`."""
    seconds = float(f"{seconds:.3g}")  # before the unit is chosen: 999.7 µs are 1 ms
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    unit = next((unit for unit, size in units.items() if abs(seconds) >= size), "ns")
    return f"{float(f'{seconds / units[unit]:.3g}'):,g} {unit}"


def _yes_or_no(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _measured_text(label: object, value: object) -> str:
    text = _one_line(_yes_or_no(value))
    word = unmeasured_word(text)
    if word is not None:
        raise ValueError(
            f"The measured value {text!r} of {_one_line(label)!r} holds {word!r}, which is neither a number with a "
            "unit nor a word of the fixed vocabulary (speedlab/display.py). Show the number, let `compare` give "
            "the verdict, show a library's words with `quoted`, and print what is the same everywhere."
        )
    return text


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def _label(value: object) -> str:
    text = _one_line(value)
    if ":" in text:
        raise ValueError(f"The label {text!r} of a measured value holds a colon, which ends the label. Reword it.")
    return text
