"""The seed's HTTP API, its stream of updates, and the page that shows them.

A request: ``app`` checks page and key, and finds its ``Endpoint`` of ``routes``, whose declaration checks query and
body. The handler reads the seed's records, or changes something by a request of operators (``app.LocalRequests``).

An update: ``roles.seed.events`` notes which records changed. ``app.follow`` takes their present state ten times a
second and leaves out rows that the reader has. In the page ``feed.js`` receives it, ``store.js`` keeps it, and
``app.js`` draws at most twice a second.
"""
