"""The drafter: guesses tokens ahead for verifiers."""
