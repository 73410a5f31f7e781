import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory_store import Nonces

from tba.protocol.commit import Done, FencedOut, Plan, Read, Swap
from tba.protocol.latest import first, taken_over, window_advanced

MINE, OTHER = f"{1:032x}", f"{2:032x}"


def test_a_commit_is_read_applied_and_swapped_on_the_etag_that_was_read():
    current = first(OTHER)
    swap = Plan(MINE, window_advanced, epoch=1).start().seen(current, "e1")
    assert isinstance(swap, Swap)
    assert (swap.body.commit, swap.body.nonce, swap.etag) == (2, MINE, "e1")
    assert swap.landed("e2") == Done(swap.body, "e2")


def test_a_conflict_with_ones_own_body_is_success():
    swap = Plan(MINE, window_advanced, epoch=1).start().seen(first(OTHER), "e1")
    again = swap.unclear()
    assert isinstance(again, Read) and again.tries == 1
    assert again.seen(swap.body, "e2") == Done(swap.body, "e2")


def test_a_conflict_within_the_epoch_is_tried_again_on_top():
    plan = Plan(MINE, window_advanced, epoch=1)
    swap = plan.start().seen(first(OTHER), "e1")
    between = window_advanced(first(OTHER), f"{3:032x}")
    again = swap.unclear().seen(between, "e9")
    assert isinstance(again, Swap) and (again.body.commit, again.etag) == (3, "e9")


def test_a_higher_epoch_fences_whatever_the_transition_is():
    newer = taken_over(first(OTHER), f"{3:032x}")
    assert Plan(MINE, window_advanced, epoch=1).start().seen(newer, "e") == FencedOut(newer)


def test_a_take_over_creates_the_first_body_or_raises_the_epoch_and_a_loser_goes_on_on_top():
    plan = Plan.take_over(MINE)
    creation = plan.start().seen(None, None)
    assert isinstance(creation, Swap) and creation.etag is None and creation.body == first(MINE)
    lost = creation.unclear().seen(first(OTHER), "e1")
    assert isinstance(lost, Swap) and lost.etag == "e1" and lost.body.epoch == 2
    assert creation.unclear().seen(creation.body, "e0") == Done(creation.body, "e0")


@given(st.lists(st.sampled_from(["land", "lose reply", "fail", "another commits", "another takes over"]), max_size=12))
def test_a_commit_lands_exactly_once_unless_it_is_fenced(events):
    nonce, latest, etag = Nonces(), first("f" * 32), 0
    state, landed = Plan(MINE, window_advanced, epoch=1).start().seen(latest, "0"), 0
    for event in events:
        if event == "another commits" and latest.epoch == 1 and not landed:
            latest, etag = window_advanced(latest, f"{9:024x}{nonce()[24:]}"), etag + 1
        elif event == "another takes over":
            latest, etag = taken_over(latest, f"{8:024x}{nonce()[24:]}"), etag + 1
        elif isinstance(state, Swap):
            hit = event != "fail" and state.etag == str(etag)
            if hit:
                latest, etag, landed = state.body, etag + 1, landed + 1
            state = state.landed(str(etag)) if hit and event == "land" else state.unclear().seen(latest, str(etag))
    while isinstance(state, Swap):
        if state.etag == str(etag):
            latest, etag, landed = state.body, etag + 1, landed + 1
        state = state.unclear().seen(latest, str(etag))
    assert landed <= 1
    assert isinstance(state, FencedOut) or landed == 1


def test_a_latest_that_is_gone_or_fell_back_is_refused():
    plan = Plan(MINE, window_advanced, epoch=2)
    with pytest.raises(ValueError, match="latest is gone"):
        plan.start().seen(None, None)
    with pytest.raises(ValueError, match="epoch of latest never falls"):
        plan.start().seen(first(OTHER), "e")
