"""The members of a ring and what they do together: views, collectives, the step transaction. Independent of models."""
