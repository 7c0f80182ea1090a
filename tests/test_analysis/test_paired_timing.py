"""The order in which things are timed, and the ratios that follow."""

from collections import Counter

import pytest

from mmspectral.analysis.paired_timing import compare_times, time_in_turn

COSTS = {"stock": 1.0, "ours": 1.5, "slow": 4.0}


class Machine:
    """A clock that steps advance by their cost, which doubles for every round."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def step(self, name):
        self.calls.append(name)
        self.now += COSTS[name] * 2 ** ((len(self.calls) - 1) // len(COSTS))


@pytest.fixture
def timed():
    machine, heard = Machine(), []
    seconds = time_in_turn(
        {name: lambda name=name: machine.step(name) for name in COSTS},
        6,
        lambda number, times: heard.append((number, times)),
        clock=lambda: machine.now,
    )
    return machine.calls, seconds, heard


def test_each_step_runs_once_a_round_and_equally_often_in_each_place(timed):
    calls, seconds, heard = timed
    rounds = [tuple(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 7  # one untimed
    assert all(set(one) == set(COSTS) for one in rounds)
    for place in range(3):
        assert Counter(one[place] for one in rounds[1:]) == dict.fromkeys(COSTS, 2)
    assert seconds["ours"] == [1.5 * 2**i for i in range(1, 7)]
    assert [number for number, _ in heard] == [1, 2, 3, 4, 5, 6]
    assert heard[-1][1] == {name: 64 * cost for name, cost in COSTS.items()}


def test_a_machine_that_slows_down_does_not_change_paired_ratios(timed):
    compared = compare_times(timed[1], "stock")
    assert {name: (one.lower, one.ratio, one.upper) for name, one in compared.items()} == {
        name: (cost, cost, cost) for name, cost in COSTS.items()
    }
    assert compared["stock"].seconds == 12  # between 8 and 16


def test_the_median_is_that_of_the_ratios_not_the_ratio_of_the_medians():
    compared = compare_times({"a": [1.0, 10.0, 100.0], "b": [3.0, 20.0, 100.0]}, "a")["b"]
    assert (compared.seconds, compared.lower, compared.ratio, compared.upper) == (20.0, 1.5, 2.0, 2.5)
    assert compare_times({"a": [4.0, 1.0, 1.0], "b": [4.0, 2.0, 9.0]}, "a")["b"].ratio == 2.0


def test_quartiles_of_two_rounds_lie_between_them():
    compared = compare_times({"a": [1.0, 1.0], "b": [1.0, 9.0]}, "a")["b"]
    assert (compared.lower, compared.ratio, compared.upper) == (3.0, 5.0, 7.0)
