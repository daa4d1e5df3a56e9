"""The table of an optimizer's steps, compared with what each state says of the events before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zenps.worker.training.gradients.step_states import STEP, SYNCHRONIZED, StepEvent, StepState

History = Sequence[StepEvent]


def last(history: History, *events: StepEvent) -> int:
    """When one of the events came last; -1 if none did."""
    return max((time for time, event in enumerate(history) if event in events), default=-1)


def is_refused(history: History) -> bool:
    return last(history, "refused") > last(history, "ended")


def has_averages(history: History) -> bool:
    averaged = last(history, "averaged", "averaged in part")
    return averaged > last(history, "gradient", "refused", "consumed")


def owes_a_part(history: History) -> bool:
    in_part = last(history, "averaged in part")
    return has_averages(history) and in_part > last(history, "averaged", "warned")


def histories(
    most: int, begin: StepState = "open", before: History = ()
) -> Iterator[tuple[History, StepState]]:
    """All that the table allows, of at most so many events; and the state in which each ends."""
    yield before, begin
    if most:
        for event, following in STEP[begin].items():
            yield from histories(most - 1, following, (*before, event))


def test_each_state_is_what_its_events_say() -> None:
    for history, state in histories(5):
        said = (state == "refused", state in SYNCHRONIZED, state == "partial")
        assert said == (is_refused(history), has_averages(history), owes_a_part(history)), (history, state)


def test_only_these_events_cannot_come_in_each_state() -> None:
    for state, events in STEP.items():
        impossible = {"averaged", "averaged in part"} if state == "refused" else set[str]()
        if state != "partial":
            impossible |= {"warned"}
        every = {event for each in STEP.values() for event in each}
        assert every - events.keys() == impossible, state
