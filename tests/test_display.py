"""What cells show: measured displays, tables, figures with alt text, widgets that work without being touched."""

import ipywidgets
import pytest
from moves import move_all
from notebooks import Printed, same_outputs

from speedlab import display, plots, widgets
from speedlab.measure import Comparison, Ratio, Timing


def shown_as(line):
    return [
        {"output_type": "display_data", "data": {"text/plain": line, display.MEASURED: {"labels": ["step time"]}}}
    ]


def test_a_measured_line_is_compared_by_its_label(capsys):
    display.measured("step time", "1.5 s")
    display.measured("step time", "0.2 s to\n0.3 s", guess="half a second")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "[measured] step time: 1.5 s"
    assert second == "[measured] step time: 0.2 s to 0.3 s (your guess: half a second)"
    assert same_outputs(shown_as(first), shown_as(second))
    assert not same_outputs(shown_as(first), shown_as(first.replace("step", "epoch")))
    assert not same_outputs(shown_as(first), shown_as(first.replace("1.5 s", "a triumph")))


@pytest.mark.parametrize(
    "value",
    [
        *("1.5 s", 3, 0.25, True, None, "12 of 40", "64 ms (60 ms to 70 ms)", "2.1x faster (1.92x to 2.3x)", "nan"),
        *("the same within 5%", "too noisy to tell (0.70x to 1.60x)", "1,234,567", "batch 32", "1.5e-05", "+3%", ""),
        *(
            "12 ms + 0.3 ms per sample",
            "840 samples/s",
            "not run here: this CPU has no hardware for fp16",
            "8-16 GiB",
        ),
    ],
)
def test_what_a_measured_value_may_be(value, capsys):
    display.measured("x", value)
    assert capsys.readouterr().out.startswith("[measured] x:")


@pytest.mark.parametrize(
    "value",
    [
        *(
            "bf16 is 5x faster",
            "compile pays",
            "wins",
            "faster than fp32",
            "as expected",
            "2 loops",
            "1.5 s; so it pays",
        ),
        *("not run here: bf16 is 5x faster", "not run here: fp32 wins", "connection closed by peer"),
    ],
)
def test_free_conclusions_are_refused_with_a_sentence(value):
    with pytest.raises(ValueError, match="neither a number with a unit nor a word of the fixed vocabulary"):
        display.measured("verdict", value)
    with pytest.raises(ValueError, match="fixed vocabulary"):
        display.table(["name", "verdict"], [("bf16", value)], measured=True)


def test_words_of_a_library_hold_what_they_always_hold(capsys):
    display.quoted("the rank says", "connection\n127.0.0.1:41 closed", always="closed")
    assert capsys.readouterr().out == "[quoted] the rank says: connection 127.0.0.1:41 closed\n"
    with pytest.raises(ValueError, match="should hold 'reset'"):
        display.quoted("the rank says", "connection closed", always="reset")


def test_a_label_with_a_colon_is_refused():
    with pytest.raises(ValueError, match="holds a colon"):
        display.measured("time: total", 3)


def test_measured_tables_compare_labels_only():
    def made(value, row="fp32", column="time"):
        shown = display.table(["dtype", column], [(row, value)], "Step", measured=True)
        return [{"output_type": "display_data", "data": shown._repr_mimebundle_()}]

    assert same_outputs(made("1.0 ms"), made("2.0 ms"))
    assert same_outputs(made(True), made(False)), "a measured yes or no is one, too"
    assert not same_outputs(made("1.0 ms"), made("1.0 ms", row="bf16"))
    assert not same_outputs(made("1.0 ms"), made("1.0 ms", column="memory"))


def test_exact_tables_compare_everything():
    def made(value):
        return [
            {"output_type": "display_data", "data": {"text/html": display.table(["a"], [(value,)])._repr_html_()}}
        ]

    assert same_outputs(made(41), made(41))
    assert not same_outputs(made(41), made(42))


def test_tables_escape_and_refuse_ragged_rows():
    assert "&lt;b&gt;" in display.table(["a"], [("<b>",)])._repr_html_()
    with pytest.raises(ValueError, match="has 1 cells, but there are 2 columns"):
        display.table(["a", "b"], [(1,)])


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    [
        ("loss 0.1234", "loss 0.1235", True),
        ("loss 0.1234", "loss 0.1236", False),
        ("loss 0.1234", "loss 0.123", False),
        ("loss 1.54e-05", "loss 1.55e-05", True),
        ("loss 1.5e-05", "loss 1.6e-05", False),
        ("accuracy 0.9", "accuracy 1.0", False),
        ("0.0", "-0.1", False),
        ("-0.001", "0.001", False),
        ("0.0123", "0.0124", True),
        ("0.012", "0.013", False),
        ("99.9", "100.0", True),
        ("loss 1.5e-05", "loss 1.5e-04", False),
        ("12 layers", "13 layers", False),
        ("a word", "another word", False),
        ("torch.float32", "torch.float16", False),
        ("v1.2.3", "v1.2.4", False),
        ("nan 0.5", "nan 0.5", True),
    ],
)
def test_decimals_of_three_digits_may_differ_in_the_last_place(old, new, equal):
    assert (Printed(old) == Printed(new)) is equal
    assert (Printed(old) != Printed(new)) is not equal


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (384 * 1024, "384 KiB"), (1.5 * 1024**3, "1.50 GiB"), (2**20 * 640, "640 MiB")]
)
def test_bytes_as_people_read_them(count, text):
    assert display.bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.474, "1.47 s"),
        (0.0225, "22.5 ms"),
        (8.3e-4, "830 µs"),
        (5e-9, "5 ns"),
        (9.997e-4, "1 ms"),
        (2480.0, "2,480 s"),
    ],
)
def test_seconds_as_people_read_them(seconds, text):
    assert display.seconds_text(seconds) == text


def test_equal_figures_are_equal_bytes_and_need_alt_text():
    def draw():
        figure, ax = plots.figure()
        plots.bars(ax, {"a": 1.0, "b": 2.0}, spread={"a": (0.9, 1.2)}, title="t", label="s")
        return figure

    assert plots.png(draw()) == plots.png(draw())
    with pytest.raises(ValueError, match="too short"):
        plots.show(draw(), "a chart")


def test_colour_is_never_the_only_carrier():
    ax = plots.figure()[1]
    plots.bars(ax, {name: 1.0 for name in "abc"})
    assert len({bar.get_hatch() for bar in ax.patches}) == 3
    ax = plots.figure()[1]
    plots.curves(ax, {name: ([1, 2], [1, 2]) for name in "abc"}, log="xy")
    assert len({line.get_marker() for line in ax.lines}) == 3
    ax = plots.figure()[1]
    plots.timeline(ax, {"gpu": [(0, 1, "forward"), (1, 2, "backward")], "cpu": [(0, 2, "load")]})
    assert len({bar.get_hatch() for bar in ax.patches}) == 3


def test_a_comparison_is_shown_with_its_verdict(monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "show", lambda figure, alt, measured: shown.append(alt))
    timing = Timing(0.2, 0.19, 0.21, (0.2,))
    plots.comparison(
        Comparison(
            ("fp32", "bf16"), "fp32", {"fp32": timing, "bf16": timing}, {"bf16": Ratio(1, 0.9, 1.1, 0.97)}, {}
        ),
        "Step",
    )
    assert "fp32: 200 ms (190 ms to 210 ms)" in shown[0]


def test_a_widget_shows_its_default_and_follows_its_controls():
    slider = ipywidgets.IntSlider(3)
    shown = widgets.explore(lambda n: (f"<b>{n * n}</b>", f"{n} squared is {n * n}"), n=slider)
    assert repr(shown) == "3 squared is 9"
    assert shown._repr_mimebundle_()["text/html"] == "<b>9</b>"
    slider.value = 5
    assert repr(shown) == "5 squared is 25"
    assert shown._repr_mimebundle_()["text/html"] == "<b>25</b>"


def test_a_widget_shows_a_figure_with_alt_text():
    def render(n):
        figure, ax = plots.figure(2, 1)
        ax.plot([0, n])
        return figure, f'a line to "{n}"'

    shown = widgets.explore(render, n=ipywidgets.IntSlider(3))
    view = shown.children[1].value
    assert view.startswith('<img alt="a line to &quot;3&quot;"') and "base64" in view
    bundle, metadata = shown._repr_mimebundle_()
    assert "text/html" not in bundle
    assert bundle["image/png"] in view, "where no kernel runs, the picture itself is what a reader sees"
    assert metadata == {"image/png": {"alt": 'a line to "3"'}}


def test_a_widget_says_what_is_wrong_with_an_input():
    def render(x):
        if x < 0:
            raise ValueError("x must not be negative; choose 0 or more.")
        return str(x), str(x)

    field = ipywidgets.FloatText(1.0)
    shown = widgets.explore(render, x=field)
    field.value = -1
    assert repr(shown) == "x must not be negative; choose 0 or more."
    field.value = 2
    assert repr(shown) == "2.0"


def test_a_long_view_is_not_cut_short():
    """ipywidgets shows the first 110 characters of a repr; the test would compare no more."""
    shown = widgets.explore(lambda n: ("<b>x</b>", "word " * 40 + str(n)), n=ipywidgets.IntSlider(3))
    assert shown._repr_mimebundle_()["text/plain"] == "word " * 40 + "3"


def test_every_control_is_moved_to_its_ends_and_through_its_choices():
    seen = []

    def render(n, kind, box, span):
        seen.append((n, kind, box, span))
        return ("", "") if kind == "none" else (f"{1 / (n - 5)}", "text")

    shown = widgets.explore(
        render,
        n=ipywidgets.IntSlider(3, 0, 5),
        kind=ipywidgets.Dropdown(options=["some", "none"]),
        box=ipywidgets.Checkbox(False),
        span=ipywidgets.IntRangeSlider(value=(1, 2), min=0, max=9),
    )
    wrong = [line for line in move_all() if line.startswith(("n=", "kind=", "box=", "span="))]
    assert wrong == ["n=5: ZeroDivisionError: division by zero", "kind='none': nothing is shown"]
    assert (0, "some", False, (1, 2)) in seen and (3, "some", True, (1, 2)) in seen
    assert (3, "some", False, (0, 9)) in seen
    assert shown.controls["n"].value == 3, "each control is put back"


@pytest.mark.parametrize(("letters", "cut"), [(10, False), (200, True)])
def test_a_title_that_is_wider_than_its_picture_is_found(letters, cut):
    def render(long):
        shown, axes = plots.figure(4, 2)
        axes.set_title("_" * (letters if long else 5))
        return shown, "an empty picture"

    kept = widgets.explore(render, long=ipywidgets.Checkbox(False))
    found = [line for line in move_all() if line.startswith("long=")]
    assert found == ["long=True: the picture is cut off at its side, probably its title"] * cut
    assert not kept.controls["long"].value
