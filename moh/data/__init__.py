"""Data: labelled images, token sequences, and the sets that ship with the project."""
