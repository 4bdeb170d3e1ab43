"""A stateless reverse proxy to ready, paired decode workers."""
