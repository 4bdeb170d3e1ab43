"""When a worker's state is old: what it said before it was ready, or before it had paired, soon is."""

import pytest

from tandem_operator.memory import NOT_READY_S, READY_S, UNSETTLED_S, Memory
from tandem_operator.observed import WorkerState


@pytest.mark.parametrize(
    ("state", "is_ready", "limit"),
    [
        (WorkerState(loaded_percent=50), False, NOT_READY_S),
        (WorkerState(loaded_percent=50), True, UNSETTLED_S),
        (WorkerState(error="timed out"), True, UNSETTLED_S),
        (WorkerState(provider="net", paired=False), True, UNSETTLED_S),
        (WorkerState(provider="net", paired=True), True, READY_S),
        (WorkerState(provider="net"), True, READY_S),
    ],
)
def test_age_limits(state: WorkerState, is_ready: bool, limit: float) -> None:
    memory = Memory(since=0.0)
    assert memory.due({"u": is_ready}, 100.0) == {"u"}
    memory.heard({"u": state}, 100.0)
    assert memory.due({"u": is_ready}, 100.0 + limit - 0.1) == set()
    assert memory.due({"u": is_ready}, 100.0 + limit) == {"u"}
