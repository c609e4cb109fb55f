"""The core of one text without drafts. With drafts: tests/roles/speculation."""

from __future__ import annotations

from roles.serving.model import Decoding, PassRequest


def test_a_text_ends_at_a_stop_token_or_at_its_length() -> None:
    for stop_id, tokens, ended in ((7, [5, 6, 7], "stop"), (9, [5, 6, 7, 8], "length")):
        decoding = Decoding([4, 4], max_new_tokens=4, stop_ids=[stop_id])
        for token in tokens:
            assert not decoding.ended
            decoding.next_pass()
            assert decoding.take_samples([token], 0.1, 0.1).tokens == (token,)
        assert (decoding.tokens, decoding.ended) == (tuple(tokens), ended)


def test_a_prompt_is_computed_in_chunks_from_where_the_session_lacks_it() -> None:
    decoding = Decoding(list(range(10)), max_new_tokens=4, cached=3)
    requests = []
    while decoding.in_prompt:
        requests.append(decoding.next_pass(chunk=4))
        decoding.take_samples([0] * requests[-1].samples, 0.1, 0.1)
    assert requests == [PassRequest(3, (3, 4, 5, 6)), PassRequest(7, (7, 8, 9), 1)]
    assert Decoding([4, 5], max_new_tokens=1, cached=2).next_pass() == PassRequest(1, (5,), 1)  # for the first sample


def test_a_pass_begins_on_the_assumption_that_drafts_under_way_are_right() -> None:
    """The text is 10, 11, ...; of four passes under way the third one's drafts are wrong from the second on."""
    decoding = Decoding([4], max_new_tokens=20, most_passes=4)
    decoding.next_pass()
    assert not decoding.may_begin, "the first token is known to nobody"
    decoding.take_samples([10], 0.1, 1.0)
    assert decoding.next_pass([11, 12]) == PassRequest(1, (10, 11, 12), 3)
    assert (decoding.needs_drafts, decoding.assumed, decoding.draft_room) == (True, [11, 12], 16)
    assert decoding.next_pass([13]) == PassRequest(4, (13,), 1)
    assert decoding.next_pass([14, 9, 16]) == PassRequest(5, (14, 9, 16), 3)
    assert decoding.next_pass([17]) == PassRequest(8, (17,), 1)
    assert not decoding.may_begin
    assert decoding.take_samples([11, 12, 13], 0.1, 1.1).tokens == (11, 12, 13)
    outcome = decoding.take_samples([14], 0.1, 1.1)
    assert (outcome.tokens, outcome.drafts, outcome.accepted) == ((14,), 1, 1)
    outcome = decoding.take_samples([15, 1, 2], 0.1, 1.1)
    assert (outcome.tokens, outcome.drafts, outcome.accepted) == ((15,), 3, 1)
    assert (decoding.needs_drafts, decoding.assumed) == (False, [])
    assert decoding.next_pass() == PassRequest(6, (15,), 1), "it cuts off what was assumed"
    assert decoding.take_samples([18], 0.1, 1.1).tokens == (), "its pass was based on a wrong token"
    assert decoding.take_samples([16], 0.1, 1.1).tokens == (16,)
    assert decoding.tokens == (10, 11, 12, 13, 14, 15, 16)
    assert (decoding.stats.judged, decoding.stats.right) == (5, 4)


def test_a_wrong_last_sample_makes_the_next_pass_stale() -> None:
    decoding = Decoding([4], max_new_tokens=20, most_passes=3)
    decoding.next_pass()
    decoding.take_samples([10], 0.1, 1.0)
    decoding.next_pass([11])
    decoding.next_pass([9, 9])
    assert decoding.take_samples([11, 12], 0.1, 1.1).tokens == (11, 12)
    assert decoding.take_samples([9, 9], 0.1, 1.1).tokens == ()
    assert (decoding.stats.judged, decoding.stats.right) == (2, 1)


def test_chunks_of_a_prompt_do_not_wait_for_each_other() -> None:
    decoding = Decoding(list(range(10)), max_new_tokens=4, most_passes=2)
    assert decoding.next_pass(chunk=4) == PassRequest(0, (0, 1, 2, 3))
    assert decoding.next_pass(chunk=4) == PassRequest(4, (4, 5, 6, 7))
    assert not decoding.may_begin
    decoding.take_samples([], 0.1, 0.1)
    assert decoding.next_pass(chunk=4) == PassRequest(8, (8, 9), 1)
    assert decoding.needs_drafts
