"""The seed's HTTP API, its page, and the page for Prometheus."""
