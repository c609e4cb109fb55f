"""Writes the files of this repository that are made from its code: see `format` in the Makefile."""
