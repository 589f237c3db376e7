"""What a placed plan costs: costs from rates (cost/), a simulated step (simulate/), its report (report/).

Training, dry runs, calibration and `predict` import it; the search above it (planner/) is not needed for any of them.
"""
