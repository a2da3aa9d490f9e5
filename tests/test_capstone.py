"""The capstone's table of techniques and its merged trace of two ranks."""

from notebooks import ROOT


def test_every_unit_has_a_technique():
    from techniques import TECHNIQUES

    units = {path.name.split("-")[0] for path in (ROOT / "code-units").glob("9.*")} | {"9.9"}
    assert {unit for technique in TECHNIQUES for unit in technique.unit.split(", ")} == units


def test_traces_of_two_ranks_are_merged():
    from traced_steps import two_ranks

    events = two_ranks(0.5, 0.0)
    assert {e["pid"] for e in events} == {0, 1}
    assert sum(e["name"] == "gloo:all_reduce" for e in events) == 6
