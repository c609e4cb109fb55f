"""The verifier: writes text with a model, faster with drafters, and serves clients and HTTP.

Begin with ``service``; ``drafters`` brings drafts for one text, and its core ``speculation`` decides how many to use.
"""
