"""Speculative decoding: a drafter guesses tokens ahead, a verifier checks many in one pass. The cores of both sides."""
