"""Attention over the paged KV cache: one protocol, one backend a device."""
