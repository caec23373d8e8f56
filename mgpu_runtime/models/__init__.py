"""Builders: a component of a checkpoint file becomes a module; import the one you need, they load heavy libraries."""
