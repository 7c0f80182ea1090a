"""The correction C, condition numbers and Jacobians of attention."""
