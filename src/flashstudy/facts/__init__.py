"""The ground floor: plain data about units, columns, devices, models, recipes and claims.

Nothing here measures or computes with tensors, and nothing here imports torch or transformers, so that anything may ask
for a fact at no cost.
"""
