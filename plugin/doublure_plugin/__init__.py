"""The part of doublure that lives inside a host engine. Never imports torch."""
