"""What a peer does: seed, worker (drafter and verifier to come). Joins wire, ring and compute into behaviour."""
