"""Comparisons: interleaved, honest about noise, complete; none of these tests reads a real clock's value."""

import itertools
import math

import pytest

from speedlab import machine, measure


@pytest.fixture
def fake_clock(monkeypatch):
    """A clock that only moves when a step says so, so that statistics can be checked exactly."""
    now = [0.0]
    monkeypatch.setattr(machine, "synchronised_clock", lambda device: lambda: now[0])

    def step(seconds):
        durations = itertools.cycle(seconds if isinstance(seconds, list) else [seconds])

        def run():
            now[0] += next(durations)

        return run

    return step


def test_ratio_and_verdict_come_from_pairs(fake_clock):
    result = measure.compare({"slow": fake_clock(0.2), "fast": fake_clock(0.1)}, seconds=1, max_rounds=8)
    assert result.ratios["fast"].median == pytest.approx(2.0)
    assert str(result.ratios["fast"]) == "2x faster"
    assert result.timings["slow"].median == pytest.approx(0.2)


def test_drift_does_not_fool_pairs(fake_clock):
    """Both variants get slower by the same factor over time: the medians overlap, the pairs do not."""
    drift = [0.1 * 1.3**i for i in range(12)]
    result = measure.compare(
        {"a": fake_clock(drift), "b": fake_clock([d / 1.5 for d in drift])}, seconds=1000, max_rounds=9
    )
    assert result.ratios["b"].low == pytest.approx(1.5)
    assert result.ratios["b"].high == pytest.approx(1.5)
    assert result.timings["a"].low < result.timings["b"].high


def test_noise_is_reported_as_no_difference(fake_clock):
    result = measure.compare(
        {"a": fake_clock(0.1), "b": fake_clock([0.09, 0.11, 0.095, 0.105, 0.1])}, seconds=1000, max_rounds=20
    )
    assert str(result.ratios["b"]) == "no difference measured"


def test_slower_is_said_as_slower(fake_clock):
    result = measure.compare({"a": fake_clock(0.1), "b": fake_clock(0.4)}, max_rounds=6)
    assert str(result.ratios["b"]) == "4x slower"


def test_runs_alternate_and_are_warmed_up():
    calls = []
    variants = {name: (lambda name=name: (calls.append(name), math.fsum(range(60_000)))) for name in "ab"}
    measure.compare(variants, seconds=1e-9, min_rounds=3, max_rounds=3)
    sampled = "".join(calls).lstrip("a").lstrip("b")
    blocks = [key for key, _ in itertools.groupby(sampled)]
    assert blocks == ["a", "b"] * 3


def test_budget_ends_the_rounds(fake_clock):
    result = measure.compare({"a": fake_clock(1.0)}, seconds=10, min_rounds=2, max_rounds=100)
    assert 10 <= len(result.timings["a"].samples) <= 12
    assert len(measure.compare({"a": fake_clock(9.0)}, seconds=1, min_rounds=4).timings["a"].samples) == 4


def test_six_pairs_make_a_95_percent_interval(fake_clock):
    few = measure.compare({"a": fake_clock(0.1), "b": fake_clock(0.1)}, seconds=1e-6, min_rounds=5)
    six = measure.compare({"a": fake_clock(0.1), "b": fake_clock(0.1)}, seconds=1e-6, min_rounds=6)
    assert few.ratios["b"].confidence == pytest.approx(1 - 2 / 2**5)
    assert six.ratios["b"].confidence == pytest.approx(1 - 2 / 2**6)


def test_variants_left_out_keep_their_row_and_its_place(fake_clock):
    """The rows of the table are the same on a machine that leaves another variant out."""
    reason = "no hardware for it here"
    here = measure.compare({"fp32": fake_clock(0.1), "bf16": reason, "fp16": fake_clock(0.2)}, max_rounds=6)
    there = measure.compare({"fp32": fake_clock(0.1), "bf16": fake_clock(0.05), "fp16": reason}, max_rounds=6)
    labels = [[line.split(":")[0] for line in repr(result).splitlines()] for result in (here, there)]
    assert labels[0] == labels[1] and labels[0][1:] == ["[measured] fp32", "[measured] bf16", "[measured] fp16"]
    assert "[measured] bf16: not run here" in repr(here) and reason in here._repr_html_()


@pytest.mark.parametrize(
    "wrong", [{"variants": {}}, {"variants": {"a": "not here"}}, {"variants": {"a": int}, "seconds": 0}]
)
def test_bad_input_gets_a_sentence(wrong):
    with pytest.raises(ValueError, match=r"give at least one variant|must both be positive"):
        measure.compare(**wrong)


def test_an_error_in_a_step_is_the_callers_and_leaves_gc_on():
    import gc

    def broken():
        raise RuntimeError("the step's own error")

    with pytest.raises(RuntimeError, match="the step's own error"):
        measure.time_step(broken)
    assert gc.isenabled()
