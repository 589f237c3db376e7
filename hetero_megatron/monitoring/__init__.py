"""What people look at during and after a run: records, console, live view, pages, throughput, stragglers, diagnosis."""
