"""The formulas, forward beside adjoint, on the array API."""
