"""Measuring the cluster that a job runs on: its chips (:mod:`.chips`) and its links (:mod:`.links`)."""

from hetero_megatron.training.calibration.run import CalibrationOptions, calibrate, format_calibration
from hetero_megatron.training.calibration.runs import degrees

__all__ = ["CalibrationOptions", "calibrate", "degrees", "format_calibration"]
