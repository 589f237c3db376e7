"""The conformance kit: run by ``hetero-megatron plugins check``, and by a plugin's own tests."""

from hetero_megatron.ops.conformance.checks import DTYPES, FAIL, PASS, SKIP, Finding, check_kernel

__all__ = ["DTYPES", "FAIL", "PASS", "SKIP", "Finding", "check_kernel"]
