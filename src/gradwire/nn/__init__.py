"""Modules that live on another worker.

remote_module.py is the module's stand-in here; remote_functions.py runs on its owner.
Read remote_module.py first.
"""
