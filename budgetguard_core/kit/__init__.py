"""What an adapter of a framework is built from."""
