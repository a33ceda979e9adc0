"""Export: writes a patched model for programs that do not know the plugin, and checks their numbers.

Each target is a row in `targets` and a file with a subclass of `Export`. `export_model` is the only caller.
"""
