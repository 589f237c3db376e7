"""Measuring the cluster that a job runs on: its chips (:mod:`.chips`) and its links (:mod:`.links`)."""

from hetero_megatron.training.calibration.run import CalibrationOptions, calibrate, format_calibration

__all__ = ["CalibrationOptions", "calibrate", "format_calibration"]
