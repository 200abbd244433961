"""Compression of messages between client and server. It knows nothing of algorithms, engines or specs."""
