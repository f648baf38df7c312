from axolotl.core.trainers.grpo.span import ONE_STEP, Span


def test_slices_come_in_turn_and_then_again() -> None:
    span, steps = Span(num_slices=2, num_iterations=3), range(8)
    assert span.length == 6
    assert [span.first(step) for step in steps] == [0] * 6 + [6] * 2
    assert [span.begins(step) for step in steps] == [step in (0, 6) for step in steps]
    assert [span.slice_of(step) for step in steps] == [0, 1] * 4
    assert [span.ends_slice(step) for step in steps] == [step in (4, 5) for step in steps]


def test_usually_every_step_begins_and_ends_a_rollout() -> None:
    for step in range(3):
        assert ONE_STEP.begins(step) and ONE_STEP.ends_slice(step)
        assert (ONE_STEP.first(step), ONE_STEP.slice_of(step)) == (step, 0)
