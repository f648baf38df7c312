from axolotl.core.trainers.grpo.rollout.seeds import completion_seed


def test_a_seed_depends_on_every_part_of_what_the_completion_is() -> None:
    base = (0, 0, 0, 0, 0)
    changed = [completion_seed(*(1 if i == part else value for i, value in enumerate(base))) for part in range(5)]
    assert len({completion_seed(*base), *changed}) == 6


def test_a_seed_is_the_same_every_time_and_fits_a_double() -> None:
    seed = completion_seed(42, 1, 17, 3)
    assert seed == completion_seed(42, 1, 17, 3)
    assert 0 <= seed < 2**48 and float(seed) == seed
