"""The roles of a peer: seed, worker, verifier and drafter. They combine ``wire``, ``ring`` and ``p2ptrain.compute``."""
