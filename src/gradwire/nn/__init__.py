"""RemoteModule: a module that lives on another worker.

remote_module.py is the proxy on the caller; remote_functions.py runs on the module's worker.
Read remote_module.py first.
"""
