"""Export: writes a patched model for programs that do not know the plugin, and checks their numbers.

Each target is a folder or file of its own with one function, its writer. `targets` lists them, and `export_model` is
the only caller.
"""
