"""A plugin whose every kernel has a defect."""
