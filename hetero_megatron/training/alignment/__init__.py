"""Precision alignment: find the operator, layer or step at which two platforms part."""
