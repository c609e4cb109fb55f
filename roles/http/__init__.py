"""HTTP for the endpoints of any peer: the server with its limits, access, and answers."""
