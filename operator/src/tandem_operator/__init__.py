"""DisaggregatedModel -> Kubernetes objects -> status. Empty until the cluster path is built."""
