"""Measuring the cluster that a job runs on: chips (:mod:`.layers`, :mod:`.operators`, :mod:`.exchange`) and links."""

from hetero_megatron.calibration.layers import Job
from hetero_megatron.calibration.run import Calibration, CalibrationOptions, calibrate

__all__ = ["Calibration", "CalibrationOptions", "Job", "calibrate"]
