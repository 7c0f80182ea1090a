"""Building mmengine's Runner for the machine at hand, resuming, and what a test run may add."""
