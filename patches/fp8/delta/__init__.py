"""Send the values of weights that changed since the last sync; knows of no framework."""
