"""Whatever a peer may send, given to every parser of it: ``python -m tests.fuzz`` for minutes, the suite for seconds.

``targets`` lists who is given what; ``engine`` runs them and measures their memory; ``test_fuzz`` is the short version,
and goes red where a function named ``..._untrusted`` is in nobody's list.
"""
