"""The Textual app: observes the seed, and sends the same requests as the command line.

``model`` (what is known) and ``format`` (how values read) are pure; ``source`` fetches; ``panels``, ``tables``,
``chain_panel`` and ``serving`` draw, and ``app`` combines them. ``chains`` finds the chains of split models.
"""
