"""Weights of linear and convolution layers, kept in memory in the form in which they are multiplied fastest."""
