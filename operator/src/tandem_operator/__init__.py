"""DisaggregatedModel -> Kubernetes objects -> status."""
