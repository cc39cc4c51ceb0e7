"""Inferix, the control plane: sessions, viewers and outputs of worlds that an engine process makes. Imports no torch."""
