"""``p2ptrain bench``: how fast this is, always beside the thing to beat, in the same run.

``commands`` is what a person calls. ``members`` starts peers as real processes and tells them what to do; ``member`` is
what runs in each of them. ``sockets`` is the limit that this machine sets; ``report`` and ``drawing`` show what came of
it. torch is loaded in the members only.
"""
