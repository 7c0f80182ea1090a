"""Positive random features and attention of linear cost over them."""
