"""Predicts what training costs here. ``predictions`` trains some steps, and computes the rest from them."""
