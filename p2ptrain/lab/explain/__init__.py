"""Predicts what training costs here. ``measuring`` trains some steps, ``predictions`` computes the rest from them."""
