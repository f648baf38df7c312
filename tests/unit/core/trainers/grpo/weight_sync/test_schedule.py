from axolotl.core.trainers.grpo.weight_sync.schedule import is_due, version_of


def pushes(steps: int, interval: int, *, first: int = 0, rollout: int = 1) -> list[int]:
    """The versions pushed by a run of `steps` steps that begins at step `first`."""
    served, pushed = 0, []
    for step in range(first, first + steps):
        if is_due(step, served, interval, rollout):
            served = version_of(step)
            pushed.append(served)
    return pushed


def test_every_step_gets_the_weights_of_the_step_before() -> None:
    assert pushes(4, 1) == [1, 2, 3, 4]


def test_an_interval_pushes_before_the_first_rollout_and_then_every_so_many_steps() -> None:
    assert pushes(7, 3) == [1, 4, 7]


def test_a_resumed_run_pushes_first_whatever_the_interval() -> None:
    assert pushes(4, 3, first=4) == [5, 7]


def test_within_a_rollout_nothing_is_pushed() -> None:
    assert pushes(9, 1, rollout=4) == [1, 5, 9]


def test_a_push_that_falls_within_a_rollout_waits_for_the_next_one() -> None:
    """After steps 3, 6 and 9; rollouts begin with every second step."""
    assert pushes(11, 3, rollout=2) == [1, 5, 7, 11]


def test_a_run_that_resumes_within_a_rollout_pushes_first() -> None:
    assert pushes(5, 1, first=2, rollout=4) == [3, 5]
