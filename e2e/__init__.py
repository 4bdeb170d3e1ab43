"""Tests on a real Kubernetes cluster, and the cluster."""
