"""Texts under random schemas match them."""

from __future__ import annotations

import pytest

from p2ptrain.compute.tokenizer import Tokenizer

from .schemas import KINDS, Refused, TextMaker, measure, problem_of


@pytest.fixture(scope="module")
def maker() -> TextMaker:
    return TextMaker(Tokenizer.of_bytes())


def test_texts_match_their_random_schemas(maker: TextMaker) -> None:
    figures = measure(range(len(KINDS)), 2, maker)
    for kind, of_kind in figures.items():
        assert not of_kind.tally["invalid"] + of_kind.tally["failed"], of_kind.notes
        assert kind == "keyword" or of_kind.tally["valid"], of_kind.notes


def test_unknown_keywords_are_refused_where_they_must_be_obeyed(maker: TextMaker) -> None:
    schema = {"type": "integer", "not": {"minimum": 0}}
    with pytest.raises(Refused, match="not"):
        maker.write(schema, 0)
    texts = [maker.write(schema, seed, is_strict=False) for seed in range(20)]
    assert any(text is None or problem_of(schema, text) for text in texts)
