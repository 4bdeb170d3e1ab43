"""Builders of the objects that a model is made of: pure, typed by what they need, no reading of the world."""
