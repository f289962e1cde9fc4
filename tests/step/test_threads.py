"""A step takes fewer threads while others want the cores, and more again afterwards."""

from kvire.step.threads import FIRST_PAUSE_STEPS, LONGEST_PAUSE_STEPS, StepThreads


def steps(threads: StepThreads, count: int, waited: float) -> list[int]:
    """Threads of each of `count` steps, of which a share is waited away wherever there are two."""
    found = []
    for _ in range(count):
        found.append(threads.count)
        threads.note(1.0, waited if threads.count > 1 else 0.0)
    return found


def test_all_threads_are_taken_while_nobody_else_wants_them() -> None:
    assert set(steps(StepThreads(4), 500, 0.05)) == {4}


def test_a_busy_core_costs_one_thread() -> None:
    threads = StepThreads(2)
    found = steps(threads, 2000, 0.5)
    assert found[:2] == [2, 1]
    assert found.count(2) <= 8, "tries become rarer"
    assert steps(threads, LONGEST_PAUSE_STEPS + 1, 0.0)[-1] == 2, "and all come back once the core is free"


def test_one_thread_is_never_given_up() -> None:
    threads = StepThreads(1)
    threads.note(1.0, 1.0)
    assert threads.count == 1


def test_a_single_disturbance_is_soon_forgotten() -> None:
    threads = StepThreads(2)
    threads.note(1.0, 0.9)
    assert steps(threads, FIRST_PAUSE_STEPS + 1, 0.0)[-1] == 2
