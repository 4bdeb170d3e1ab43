"""The embedded mode: one manifest, its workers and router as local processes."""
