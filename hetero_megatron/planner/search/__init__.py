"""The search for the best plan: proposers, the incumbent that keeps the best, local search.

``driver.search`` asks each proposer for templates; ``incumbent`` scores them within the time budget.
"""
