"""Instruments: they time, weigh and rank what they are given, and know nothing of any study."""
