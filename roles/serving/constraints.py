"""Grammars that a text must match, by llguidance: which tokens may follow, as a mask for each sample of a pass.

A constraint is kept where the text is, and the model's last stage gets only masks. So a token is that of the text's
seed and number among the allowed ones, whether the text is computed alone, in a batch, with drafts or split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial

import llguidance

from p2ptrain.compute.tokenizer import Tokenizer, library_errors
from p2ptrain.core.errors import ConfigError, JobFailed, UserError
from p2ptrain.core.serving import mask_bytes

LONG_S = 0.001
"""Masks whose last ones took so long are computed on a thread."""
MOST_COMPILED = 8
"""Grammars that stay compiled. A large one takes a second, and all texts of a request have the same."""
Submit = Callable[[Callable[[], bytes]], asyncio.Future[bytes]]


class TokenTable:
    """The bytes of a model's tokens. ``vocab_size``: of the model, which may have more tokens than its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self.matcher = lru_cache(MOST_COMPILED)(self._matcher)

    @cached_property
    def library(self) -> llguidance.LLTokenizer | ConfigError:
        """Takes a second for a large vocabulary. The error: its kind of tokenizer is not supported."""
        try:
            with library_errors(f"the tokenizer of {self._tokenizer.directory or 'a new model'}"):
                size = max(self.vocab_size, self._tokenizer.vocab_size)
                return llguidance.LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=size)
        except ConfigError as error:
            return error

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the beginning of a text, to be copied. It has an error if the grammar is invalid. Raises
        ``ConfigError``: the kind of tokenizer is not supported."""
        if isinstance(self.library, ConfigError):
            raise self.library
        return llguidance.LLMatcher(self.library, grammar, log_level=0)

    def bytes_of(self, token: int) -> bytes:
        if isinstance(self.library, ConfigError):
            return (self._tokenizer.backend.id_to_token(token) or "").encode()
        return self.library.decode_bytes([token])


class Constraint:
    """The grammar of one text, at the end of what is written.

    Args:
        grammar: in llguidance's JSON form, or Lark.
        ends: tokens that end the text. They are allowed where the grammar lets it end, and only there.

    Attributes:
        is_over: the text has ended, or nothing can follow.

    Raises:
        UserError: the grammar is invalid; methods: it is too complex.
    """

    def __init__(self, table: TokenTable, grammar: str, ends: frozenset[int]) -> None:
        self._matcher = table.matcher(grammar).deep_copy()
        self._ends = {token for token in ends if token < table.vocab_size}
        self._mask_bytes = mask_bytes(table.vocab_size)
        self._took_s = LONG_S
        self.is_over = self._matcher.is_stopped()
        _check(self._matcher)

    def accept(self, tokens: Sequence[int]) -> int:
        """Take the next tokens of the text. Returns how many of them belong to it: none after its end. Raises
        ``JobFailed``: the grammar does not allow them."""
        for count, token in enumerate(tokens):
            if self.is_over:
                return count
            if token in self._ends and self._matcher.is_accepting():
                self.is_over = True
            elif self._matcher.try_consume_tokens([token]):
                self.is_over = self._matcher.is_stopped()
            else:
                _check(self._matcher)
                raise JobFailed(f"the model's token {token} does not match the grammar of the text")
        return len(tokens)

    async def next_masks(self, drafts: Sequence[int], samples: int, submit: Submit, now: Callable[[], float]) -> bytes:
        """``masks``, computed at once, so that the pass joins those that other texts ask for now; or by ``submit``, on
        a thread, if the last ones took long."""
        compute, began = partial(self.masks, drafts, samples), now()
        masks = compute() if self._took_s < LONG_S else await submit(compute)
        self._took_s = now() - began
        return masks

    def masks(self, drafts: Sequence[int], samples: int) -> bytes:
        """The masks of the last ``samples`` samples of a pass: the first possible one follows the text, and each other
        one a draft. After a draft that the grammar refuses, the masks allow all: those samples will not be used. Raises
        ``JobFailed``: the grammar allows no token."""
        matcher = self._matcher.deep_copy() if drafts else self._matcher
        masks, everything = [], b"\xff" * self._mask_bytes
        is_open = not self.is_over
        for place in range(len(drafts) + 1):
            is_open = is_open and (place == 0 or bool(matcher.try_consume_tokens([drafts[place - 1]])))
            is_open = is_open and not matcher.is_stopped()
            if place > len(drafts) - samples:
                masks.append(self._mask(matcher) if is_open else everything)
        return b"".join(masks)

    def _mask(self, matcher: llguidance.LLMatcher) -> bytes:
        mask = bytearray(matcher.compute_bitmask()[: self._mask_bytes])
        may_end = matcher.is_accepting()
        for token in self._ends:
            byte, bit = token // 8, 1 << token % 8
            mask[byte] = mask[byte] | bit if may_end else mask[byte] & ~bit
        if not any(mask):
            _check(matcher)
            why = "the grammar of the text cannot go on: none of the model's tokens can follow"
            raise JobFailed(why, remedy="use a simpler schema or grammar")
        return bytes(mask)


def _check(matcher: llguidance.LLMatcher) -> None:
    """Raise ``UserError`` if the grammar is invalid, or too complex for the library, which a text may show late."""
    if matcher.is_error():
        why = matcher.get_error().partition("\n<state>")[0][:500]
        raise UserError(f"the grammar cannot be used: {why}", remedy="correct or simplify the schema or grammar")
