"""Comparisons: interleaved, honest about noise, complete; none of these tests reads a real clock's value."""

import itertools
import math

import pytest
from notebooks import BRIEF

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
    assert str(result.ratios["fast"]) == "2x faster (2x to 2x)"
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


def test_three_verdicts(fake_clock):
    noise = [0.07, 0.13, 0.09, 0.12, 0.1]
    variants = {"a": 0.1, "slow": 0.4, "same": [0.099, 0.101, 0.1], "noisy": noise}
    result = measure.compare({k: fake_clock(v) for k, v in variants.items()}, seconds=1000, max_rounds=20)
    assert str(result.ratios["slow"]) == "4x slower (4x to 4x)"
    assert str(result.ratios["same"]) == "the same within 5%"
    assert str(result.ratios["noisy"]).startswith("too noisy to tell (0.")
    assert [result.ratios[k].verdict for k in ("slow", "same", "noisy")] == ["slower", "same", "noisy"]


def test_a_small_gain_keeps_its_digits():
    assert str(measure.Ratio(1.04, 1.02, 1.06, 0.95)) == "1.04x faster (1.02x to 1.06x)"
    assert str(measure.Ratio(1 / 1.3, 1 / 2.04, 1 / 1.15, 0.95)) == "1.30x slower (1.15x to 2x)"
    assert str(measure.Ratio(1.0, 0.7, 12.4, 0.95)) == "too noisy to tell (0.70x to 12x)"
    assert str(measure.Ratio(1.996, 1.996, 1.996, 0.95)) == "2x faster (2x to 2x)"


def test_separate_middle_halves_are_not_called_equal(fake_clock):
    """239 against 287 ms, with some noise: the pairs tell them apart."""
    a, b = [0.239, 0.236, 0.243, 0.25, 0.238], [0.287, 0.283, 0.292, 0.285, 0.31, 0.288, 0.284]
    result = measure.compare({"a": fake_clock(a), "b": fake_clock(b)}, seconds=1000)
    assert result.ratios["b"].verdict == "slower"


def test_sampling_ends_when_every_verdict_is_clear(fake_clock):
    clear = measure.compare({"a": fake_clock(0.1), "b": fake_clock(0.2)}, seconds=1000)
    assert len(clear.timings["a"].samples) == 6
    unclear = {"a": fake_clock(0.1), "b": fake_clock([0.07, 0.13, 0.09, 0.12, 0.1])}
    assert len(measure.compare(unclear, seconds=1000, max_rounds=40).timings["a"].samples) == 40


def test_repeated_looks_share_the_error(monkeypatch):
    """Equal variants are called different in at most one comparison of twenty, however often one looks."""
    random = __import__("random").Random(7)
    now = [0.0]
    monkeypatch.setattr(machine, "synchronised_clock", lambda device: lambda: now[0])

    def step():
        now[0] += random.lognormvariate(0, 0.5)

    verdicts = [
        measure.compare({"a": step, "b": step}, seconds=1e9, max_rounds=48).ratios["b"].verdict for _ in range(400)
    ]
    assert sum(verdict in ("faster", "slower") for verdict in verdicts) <= 0.05 * 400 + 10


def test_runs_alternate_and_are_warmed_up():
    calls = []
    variants = {name: (lambda name=name: (calls.append(name), math.fsum(range(60_000)))) for name in "ab"}
    measure.compare(variants, seconds=1e-9, min_rounds=6, max_rounds=6)
    sampled = "".join(calls).lstrip("a").lstrip("b")
    blocks = [key for key, _ in itertools.groupby(sampled)]
    assert blocks == list("abababa"), "A B, B A, A B and so on: neighbouring rounds meet in the same variant"


def test_a_steady_drift_does_not_fool_the_order(monkeypatch):
    """On a machine that slows down at a steady rate, who comes second looks slower: each of two equals in turn."""
    now = [0.0]
    monkeypatch.setattr(machine, "synchronised_clock", lambda device: lambda: now[0])

    def step():
        now[0] += 1.0 + 0.001 * now[0]

    ratio = measure.compare({"a": step, "b": step}, seconds=1e9, min_rounds=20, max_rounds=20).ratios["b"]
    assert ratio.low < 0.9995 and ratio.high > 1.0005
    assert ratio.median == pytest.approx(1.0, abs=1e-4)


def test_budget_ends_the_rounds(fake_clock):
    result = measure.compare({"a": fake_clock(1.0)}, seconds=10, min_rounds=2, max_rounds=100)
    assert 10 <= len(result.timings["a"].samples) <= 12
    assert len(measure.compare({"a": fake_clock(9.0)}, seconds=1, min_rounds=4).timings["a"].samples) == 4


def test_a_run_whose_clocks_nobody_reads_samples_as_briefly_as_it_may(fake_clock, monkeypatch):
    monkeypatch.setenv(*next(iter(BRIEF.items())))
    result = measure.compare({"a": fake_clock(1.0), "b": fake_clock(0.1)}, seconds=100)
    assert len(result.timings["a"].samples) == 1
    assert result.ratios["b"].verdict == "noisy", "one pair tells nothing, however far apart it is"
    quick = measure.compare({"a": fake_clock(1e-3), "b": fake_clock(1e-4)}, seconds=100)
    assert quick.ratios["b"].verdict == "faster", "what is quick is sampled until it is clear"


def test_pairs_that_are_too_few_for_a_verdict_get_none():
    assert [measure.ratio([2.0] * n).verdict for n in (1, 4, 5)] == ["noisy", "noisy", "faster"]


def test_six_pairs_make_a_95_percent_interval(fake_clock):
    six = measure.compare({"a": fake_clock(0.1), "b": fake_clock(0.1)}, seconds=1e-6)
    assert six.ratios["b"].confidence == pytest.approx(1 - 2 / 2**6)
    assert measure.ratio([1.0] * 5).confidence == pytest.approx(1 - 2 / 2**5)
    assert measure.ratio(range(1, 21)).low == 6, "of 20 pairs, the 6th to the 15th: Binomial(20, 1/2) table"
    with pytest.raises(ValueError, match="needs 6 rounds at least"):
        measure.compare({"a": fake_clock(0.1), "b": fake_clock(0.1)}, min_rounds=5)


def test_variants_left_out_keep_their_row_and_its_place(fake_clock):
    """The rows of the table are the same on a machine that leaves another variant out."""
    reason = "no hardware for it here"
    here = measure.compare({"fp32": fake_clock(0.1), "bf16": reason, "fp16": fake_clock(0.2)}, max_rounds=6)
    there = measure.compare({"fp32": fake_clock(0.1), "bf16": fake_clock(0.05), "fp16": reason}, max_rounds=6)
    labels = [[line.split(":")[0] for line in repr(result).splitlines()] for result in (here, there)]
    assert labels[0] == labels[1] and labels[0][1:] == ["[measured] fp32", "[measured] bf16", "[measured] fp16"]
    assert f"[measured] bf16: not run here: {reason}" in repr(here) and reason in here._repr_html_()


@pytest.mark.parametrize(
    "wrong", [{"variants": {}}, {"variants": {"a": "not here"}}, {"variants": {"a": int}, "seconds": 0}]
)
def test_bad_input_gets_a_sentence(wrong):
    with pytest.raises(ValueError, match=r"give at least one variant|must all be positive"):
        measure.compare(**wrong)


def test_an_error_in_a_step_is_the_callers_and_leaves_gc_on():
    import gc

    def broken():
        raise RuntimeError("the step's own error")

    with pytest.raises(RuntimeError, match="the step's own error"):
        measure.time_step(broken)
    assert gc.isenabled()
