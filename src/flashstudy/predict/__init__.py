"""The cost model: counts the work of a step (cost), turns it into time with parts and an interval (roofline).

It knows facts only, no measurement of a study, so that a prediction can be held against one.
"""
