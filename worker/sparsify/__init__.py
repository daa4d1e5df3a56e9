"""Sparsification of dense gradients: selection, residuals, and the exchange of what is selected."""
