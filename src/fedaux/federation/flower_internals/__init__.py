"""Everything that replaces or calls parts of Flower that are not its public interface.

tests/federation/test_flower_internals.py lists these parts, with what to check again for a new
version of Flower.
"""
