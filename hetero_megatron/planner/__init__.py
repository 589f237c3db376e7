"""Planning without torch: rates, costs, memory, prediction and search."""
