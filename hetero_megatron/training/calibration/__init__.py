"""Measuring the cluster that a job runs on: chips (:mod:`.chips`), links (:mod:`.links`), and writing the rates down."""

from hetero_megatron.training.calibration.run import CalibrationOptions, calibrate, format_calibration

__all__ = ["CalibrationOptions", "calibrate", "format_calibration"]
