"""A worker pod: its lead, which joins engine and messenger, and the processes around it."""
