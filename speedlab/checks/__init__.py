"""The checks that exercises call: one module an exercise, on what `core` holds."""
