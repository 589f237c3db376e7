"""The conformance kit: run by ``hetero-megatron plugins check``, and by a plugin's own tests."""

from hetero_megatron.ops.conformance.checks import DTYPES, check_kernel, kernel_steps
from hetero_megatron.ops.conformance.subject import FAIL, PASS, SKIP, Finding

__all__ = ["DTYPES", "FAIL", "PASS", "SKIP", "Finding", "check_kernel", "kernel_steps"]
