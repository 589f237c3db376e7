"""A fuzzer of what others write: ``make test-fuzz N=4000 SEED=1``. ``python -m tests.fuzz --help``."""
