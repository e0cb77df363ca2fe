"""The embedded hosts, their scenes and the NumPy evaluator."""
