"""sparse_compile."""
