"""The LLM engine: scheduling on the lead (no torch), forward passes on the ranks (torch)."""
