"""The core of one text without drafts. With drafts: tests/roles/speculation."""

from __future__ import annotations

import pytest

from roles.serving.model import Decoding, PassRequest


def test_a_text_ends_at_a_stop_token_or_at_its_length() -> None:
    for stop_id, tokens, ended in ((7, [5, 6, 7], "stop"), (9, [5, 6, 7, 8], "length")):
        decoding = Decoding([4, 4], max_new_tokens=4, stop_ids=[stop_id])
        for token in tokens:
            assert not decoding.ended
            decoding.next_pass()
            assert decoding.take_samples([token], 0.1, 0.1).tokens == (token,)
        assert (decoding.tokens, decoding.ended) == (tuple(tokens), ended)
    for ids, most in (([], 1), ([4], 0)):
        with pytest.raises(ValueError, match="prompt"):
            Decoding(ids, max_new_tokens=most)


def test_a_prompt_is_computed_in_chunks_from_where_the_session_lacks_it() -> None:
    decoding = Decoding(list(range(10)), max_new_tokens=4, cached=3)
    requests = []
    while decoding.in_prompt:
        requests.append(decoding.next_pass(chunk=4))
        decoding.take_samples([0] * requests[-1].samples, 0.1, 0.1)
    assert requests == [PassRequest(3, (3, 4, 5, 6)), PassRequest(7, (7, 8, 9), 1)]
    assert Decoding([4, 5], max_new_tokens=1, cached=2).next_pass() == PassRequest(1, (5,), 1)  # for the first sample
