"""Times of several things done in turn, compared pair by pair.

A slow minute of a shared machine then falls on all of them alike, which the
ratio of two medians of separate runs does not survive.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PairedTimes:
    """Times of one variant and, round by round, of what it is compared with.

    Args:
        seconds: Median time.
        ratio: Median of the ratios of the two times of a round.
        lower: Their lower quartile.
        upper: Their upper quartile.
    """

    seconds: float
    ratio: float
    lower: float
    upper: float


def time_in_turn(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    on_round: Callable[[int, dict[str, float]], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time every step once per round, each in every place of the order as often as the others.

    Args:
        steps: What is timed, by name. Work on a GPU must be waited for inside
            the step. Each is called once before, untimed.
        rounds: How often.
        on_round: Called after each round with its number from 1 and its times in seconds.
        clock: Says the time in seconds.

    Returns:
        Seconds by name, one value per round.
    """
    for step in steps.values():
        step()
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            steps[name]()
            seconds[name].append(clock() - start)
        if on_round is not None:
            on_round(i + 1, {name: times[-1] for name, times in seconds.items()})
    return seconds


def compare_times(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, PairedTimes]:
    """Compare every variant with the baseline, which is among them with ratio 1.

    Args:
        seconds: What :func:`time_in_turn` returned for two rounds or more.
        baseline: Name of what the others are divided by.
    """
    compared = {}
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[baseline], strict=True)]
        lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")  # never outside the data
        compared[name] = PairedTimes(statistics.median(times), median, lower, upper)
    return compared
