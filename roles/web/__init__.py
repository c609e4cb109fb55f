"""The seed's HTTP API, its stream of updates, and the page that shows them."""
