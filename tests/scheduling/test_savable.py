"""Which deadlines can be met together, compared with trying every set and every order."""

from itertools import chain, combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from instgenie.scheduling.savable import hopeless, num_in_time
from instgenie.scheduling.terms import NO_DEADLINE, Standing, Terms

drawn = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=6)  # work, deadline


def make_claims(pairs: list[tuple[int, int]]) -> list[Standing]:
    return [Standing(Terms(deadline, number=index), work, work=work) for index, (work, deadline) in enumerate(pairs)]


@settings(deadline=None, max_examples=60)
@given(drawn)
def test_as_many_deadlines_are_met_as_by_any_order(pairs: list[tuple[int, int]]) -> None:
    claims = make_claims(pairs)
    given_up = hopeless(claims, range(len(claims)), now=0.0)
    kept = sorted(set(range(len(claims))) - given_up, key=lambda index: claims[index].terms.deadline)
    every = chain.from_iterable(combinations(range(len(claims)), num) for num in range(len(claims) + 1))
    best = max(len(some) for some in every if any(num_in_time(claims, p, 0.0) == len(some) for p in permutations(some)))
    assert num_in_time(claims, kept, 0.0) == len(kept) == best


def test_the_one_with_the_most_work_is_given_up() -> None:
    assert hopeless(make_claims([(2, 10), (8, 10), (3, 10)]), range(3), now=0.0) == {1}
    assert hopeless(make_claims([(2, 10), (3, 10)]), range(2), now=0.0, busy=6.0) == {1}
    assert hopeless(make_claims([(2, 10), (3, 10)]), range(2), now=5.0) == set()
    assert hopeless(make_claims([(2, 10), (3, 10)]), range(2), now=7.5) == {1}


def test_those_without_a_deadline_are_never_hopeless() -> None:
    claims = [Standing(Terms(NO_DEADLINE), 1e6, work=1e6), Standing(Terms(1.0), 5.0, work=5.0)]
    assert hopeless(claims, range(2), now=0.0) == {1}
    assert num_in_time(claims, range(2), now=0.0) == 0
