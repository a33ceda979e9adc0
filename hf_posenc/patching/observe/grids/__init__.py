"""The native scheme of a stack whose input is pixels."""
