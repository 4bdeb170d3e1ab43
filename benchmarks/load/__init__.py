"""What the serving benchmarks share: a model, a deployment, arrivals, a client that measures, figures."""
