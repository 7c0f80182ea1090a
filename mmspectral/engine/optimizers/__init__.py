"""Optimizer wrapper constructors."""
