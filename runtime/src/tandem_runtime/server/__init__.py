"""The OpenAI API in front of one decode or mixed worker."""
