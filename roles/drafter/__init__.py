"""The drafter: guesses tokens ahead of verifiers with a small model.

Begin with ``drafting``, the core of one session; ``draft_server`` serves verifiers with it.
"""
