"""`plugins check`: the conformance kit in a supervised process. Only worker.py loads torch."""
