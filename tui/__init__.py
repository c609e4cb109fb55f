"""The Textual app: observes the seed, and sends the same requests as the command line.

``model`` (what is known) and ``format`` (how values read) are pure; ``source`` fetches; ``panels``, ``tables``,
``chain_panel`` and ``serving`` draw, ``dialogs`` asks, ``app`` combines them. ``chains`` finds chains of split models.
"""
