"""The KV messenger: who sends which pages to whom, and when memory may be used again."""
