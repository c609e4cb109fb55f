"""The role that guesses ahead for verifiers."""
